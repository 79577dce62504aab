"""The console's backend for tests: a real desk, and a window that says a text in rounds of every kind."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from deployments.desk import Desk
from deployments.generation import Event, Generation
from deployments.lane import Lane
from deployments.view import Overview, RouterView
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text.stream import TextStream
from tests.deployments.http_stub import StubBackend, tokenizer
from tests.deployments.test_desk import LocalStage

ANSWER = (
    "The capital of France is Paris. It lies on the Seine, and has been the country's capital for most of "
    "its history. Zürich 🙂 is not. To count: one, two, three, four, five, six, seven, eight, nine, ten."
    "\n\nThat is all."
)
WIDTHS = (8, 16, 8, 1, 16, 4)  # one round after the other
WALKS = (7, 3, 0, 11, 5, 15, 2)  # at most so many, by round and row


@dataclass
class SpokenRow:
    request: RowRequest
    left: list[int]
    has_first: bool = False


@dataclass
class SpeakingWindow:
    """``PlayableWindow``: each row says the answer, the first token from reading its prompt."""

    window_id: WindowId
    rows: dict[RowId, SpokenRow] = field(default_factory=dict)
    num_rounds: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def admit(self, request: RowRequest) -> None:
        assert request.prompt_length is not None
        said = len(request.tokens) - request.prompt_length
        answer = [*tokenizer().encode(ANSWER), next(iter(tokenizer().eos_token_ids))]
        self.rows[request.row_id] = SpokenRow(request, answer[said:][: request.max_tokens])

    def retire(self, row_id: RowId) -> None:
        self.rows.pop(row_id, None)

    def begin(self) -> None:
        """Nothing to ask for ahead."""

    def step(self) -> RoundReport:
        width = WIDTHS[self.num_rounds % len(WIDTHS)]
        self.num_rounds += 1
        progress = tuple(self._play(row, slot, width) for slot, row in enumerate(list(self.rows.values())))
        for row in progress:
            if row.finish:
                self.retire(row.row_id)
        return RoundReport(
            self.window_id, self.num_rounds, width, progress, len(progress), 0, 0, {"verify": 0.02}
        )

    def close(self) -> None:
        self.rows.clear()

    def _play(self, row: SpokenRow, slot: int, width: int) -> RowProgress:
        first = [] if row.has_first else [row.left.pop(0)]
        row.has_first = True
        walked = min(width - 1, WALKS[(self.num_rounds + 3 * slot) % len(WALKS)])
        committed, row.left = row.left[: walked + 1], row.left[walked + 1 :]
        is_stop = not row.left and committed[-1:] == [next(iter(tokenizer().eos_token_ids))]
        finish = None if row.left else "stop" if is_stop else "length"
        accepted = min(walked, len(committed))
        tokens = (*first, *committed)
        return RowProgress(
            row.request.row_id, tokens, width - 1, walked, accepted, finish, num_first=len(first)
        )


class DeskBackend(StubBackend):
    """Plays through a desk, so that what the console shows comes from where it really comes from."""

    def __init__(self, pace_s: float = 0.01) -> None:
        super().__init__()
        self.model_card = replace(self.model_card, max_context=4096)
        stage = LocalStage()
        stage.lane = Lane(SpeakingWindow, max_windows=2)
        stage.pace_s = pace_s
        self.desk = Desk(stage, self.statistics, self._new_text, tokenizer().eos_token_ids, max_rows=4)
        self.siblings: tuple[RouterView, ...] = ()
        self.num_missing = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        self.generations.append(generation)
        async for event in self.desk.play(generation):
            yield event

    async def overview(self) -> Overview:
        own = RouterView.now(self.statistics.snapshot(), self.desk.view())
        return Overview("router-0", (own, *self.siblings), self.num_missing)

    def _new_text(self, generation: Generation) -> TextStream:
        return TextStream(tokenizer(), generation.stop_strings, traces=generation.delivery.rounds)
