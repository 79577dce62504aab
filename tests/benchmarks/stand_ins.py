"""Lanes that sleep what an M3 Ultra was measured to take, so that everything else is under test.

A round takes its time, and every row earns one or two drafts in it and the target's own token, by turns. A
round's first two tokens say when it was over (``stamp``), so that a client in any process can tell how late
it hears of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.burst import Stage
from deployments.desk import Desk
from deployments.generation import Event, Generation, ModelCard, Tokenizer
from deployments.lanes import Standing
from deployments.messages import Admit, Answer, Closed, LastCall, Letter, Opened, Opening, Played, Retire
from deployments.telemetry import Snapshot, Statistics
from deployments.view import Overview, RouterView
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text.stream import TextStream
from dflash_core.text.tokenizer import Tokenizer as RealTokenizer
from tests.benchmarks.cpu_clock import CpuTimeLoop

ROUND_S = 0.066  # M3 Ultra, Qwen3.5-4B 4-bit, block 16, 4 rows
TICK_S = 1e-4  # resolution of a stamp
BASE, FIRST_ID = 4096, 300  # ordinary tokens of the embedded vocabulary


def stamp(at: float) -> tuple[int, int]:
    """A moment of the monotonic clock as two tokens."""
    ticks = int(at / TICK_S) % BASE**2
    return FIRST_ID + ticks // BASE, FIRST_ID + ticks % BASE


def lateness(token_ids: Sequence[int], now: float) -> float:
    """Seconds since the moment that a round's tokens begin with."""
    ticks = (token_ids[0] - FIRST_ID) * BASE + token_ids[1] - FIRST_ID
    late = (int(now / TICK_S) - ticks) % BASE**2
    return (late if late < BASE**2 // 2 else late - BASE**2) * TICK_S


@dataclass
class ScriptedWindow:
    """The part of ``dflash_core.window.Window`` that a lane uses, without a model."""

    window_id: WindowId
    num_rounds: int = 0
    rows: dict[RowId, int] = field(default_factory=dict)  # tokens still to emit

    @property
    def has_work(self) -> bool:
        return bool(self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def admit(self, request: RowRequest) -> None:
        self.rows[request.row_id] = request.max_tokens

    def retire(self, row_id: RowId) -> None:
        self.rows.pop(row_id, None)

    def play(self, over_at: float, round_s: float) -> RoundReport:
        """The round that was over at this moment."""
        self.num_rounds += 1
        first = stamp(over_at)
        progress: list[RowProgress] = []
        for slot, (row_id, budget) in enumerate(list(self.rows.items())):
            accepted = 1 + (self.num_rounds + slot) % 2
            tokens = (*first, FIRST_ID)[: min(1 + accepted, max(2, budget))]
            is_over = budget <= len(tokens)
            self.rows[row_id] = budget - len(tokens)
            if is_over:
                del self.rows[row_id]
            finish = "length" if is_over else None
            progress.append(RowProgress(row_id, tokens, 15, accepted, len(tokens) - 1, finish))
        seconds = {"draft": 0.25 * round_s, "verify": 0.75 * round_s}
        num_rows = len(progress)
        return RoundReport(self.window_id, self.num_rounds, 16, tuple(progress), num_rows, 0, 0, seconds)


class SimulatedLane:
    """Plays its windows by the event loop's clock: a round is over when it is due, however late we are."""

    def __init__(self, name: str, round_s: float):
        self.name = name
        self.cpu_s = 0.0  # of the stand-in itself
        self._round_s = round_s
        self._windows: dict[WindowId, tuple[ScriptedWindow, asyncio.Queue[Answer]]] = {}
        self._last_calls: set[WindowId] = set()
        self._is_due = False

    @property
    def standing(self) -> Standing:
        num_rows = sum(window.num_rows for window, _ in self._windows.values())
        return Standing(self.name, num_rows, round_s=self._round_s)

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._windows[opening.window_id] = (ScriptedWindow(opening.window_id), answers)
        self.apply(opening.window_id, opening.letters)
        try:
            yield Opened(self.name)
            while True:
                answer = await answers.get()
                yield answer
                if isinstance(answer, Closed):
                    return
        finally:
            self._windows.pop(opening.window_id, None)

    def apply(self, window_id: WindowId, letters: Iterable[Letter]) -> None:
        if window_id not in self._windows:
            return
        window, answers = self._windows[window_id]
        for letter in letters:
            match letter.command:
                case Admit(request):
                    window.admit(request)
                case Retire(row_id):
                    window.retire(row_id)
                case LastCall():
                    self._last_calls.add(window_id)
        if window.has_work:
            self._wake()
        elif window_id in self._last_calls:
            answers.put_nowait(Closed())

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._await_round(asyncio.get_running_loop().time())

    def _await_round(self, now: float) -> None:
        due = now + self._round_s
        asyncio.get_running_loop().call_at(due, self._end_round, due)

    def _end_round(self, due: float) -> None:
        began = time.thread_time()
        has_work = False
        for window_id, (window, answers) in self._windows.items():
            if window.has_work:
                answers.put_nowait(Played(window.play(due, self._round_s), 1_000_000))
                has_work |= window.has_work
            if window_id in self._last_calls and not window.has_work:
                answers.put_nowait(Closed())
        self._is_due = has_work
        if has_work:
            self._await_round(due)
        taken = time.thread_time() - began
        self.cpu_s += taken
        loop = asyncio.get_running_loop()
        if isinstance(loop, CpuTimeLoop):
            loop.excuse(taken)


class SimulatedStage(Stage):
    """Many lanes in the router's own event loop."""

    @property
    def is_anywhere_open(self) -> bool:
        return False

    def __init__(self, num_lanes: int, round_s: float):
        self.lanes = {f"lane-{i}": SimulatedLane(f"lane-{i}", round_s) for i in range(num_lanes)}
        self._homes: dict[WindowId, SimulatedLane] = {}

    @property
    def cpu_s(self) -> float:
        return sum(lane.cpu_s for lane in self.lanes.values())

    def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        lane = self._homes[opening.window_id] = self.lanes[opening.lane]
        return lane.play(opening)

    def send(self, window_id: WindowId, letter: Letter) -> None:
        # In its turn of the loop, as mail from elsewhere would be: after the opening.
        asyncio.get_running_loop().call_soon(self._homes[window_id].apply, window_id, (letter,))

    def forget(self, window_id: WindowId) -> None:
        self._homes.pop(window_id, None)

    async def mend(self) -> None: ...


class DeskBackend:
    """``generation.OverviewBackend`` over a desk and simulated lanes: a router without Ray."""

    def __init__(self, stage: SimulatedStage, tokenizer: RealTokenizer, rows: int):
        self.model_card = ModelCard(("demo",), 0, 1_000_000)
        self.tokenizer: Tokenizer = tokenizer
        self.statistics = Statistics("demo", "0")
        new_text: Callable[[Generation], TextStream] = lambda generation: TextStream(tokenizer)  # noqa: E731
        eos = tokenizer.eos_token_ids
        queue = len(stage.lanes) * rows
        self.desk = Desk(stage, self.statistics, new_text, eos, max_rows=rows, max_queue=queue)
        self.desk.hear("simulated", [lane.standing for lane in stage.lanes.values()])

    def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        return self.desk.play(generation)

    async def health(self) -> Mapping[str, object]:
        return {"status": "ok", "windows": self.desk.num_windows}

    async def snapshot(self) -> Sequence[Snapshot]:
        return [self.statistics.snapshot()]

    async def overview(self) -> Overview:
        return Overview("0", (RouterView.now(self.statistics.snapshot(), self.desk.view()),))
