"""The real engine of both replicas, each on its MLX thread as in the cluster, without Ray between them."""

import asyncio
from dataclasses import replace
from typing import Any

from deployments.boundaries import places_to_save
from deployments.engine import LocalEngine
from deployments.exchange.messages import DraftCall, DraftReply
from deployments.exchange.sessions import Sessions
from deployments.messages import Admit, Answer, Closed, LastCall, Letter, Played
from deployments.mlx_thread import MlxThread
from deployments.settings import Settings
from dflash_core.events import RowProgress
from dflash_core.pair import TARGET
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text import Tokenizer

SETTINGS = Settings(max_rows=1, block_width=4, calibration_s=0, probe_s=0, feature_bytes=2**28)
SYSTEM = {"role": "system", "content": "You answer in one short sentence, and name no other place."}
QUESTIONS = ("Name the capital of Japan, please.", "What is the capital of France?")


class ThreadLink:
    """A drafter on a thread of its own."""

    def __init__(self, thread: MlxThread, sessions: Sessions):
        self._thread, self._sessions = thread, sessions
        self.calls: list[DraftCall] = []

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        self.calls.append(call)
        return await self._thread.run(lambda: self._sessions.draft(call))

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        return await self._thread.run(lambda: self._sessions.lengths(window_id))

    async def close(self, window_id: WindowId) -> None:
        await self._thread.run(lambda: self._sessions.close(window_id))


async def played(thread: MlxThread, lane: Any, request: RowRequest) -> list[RowProgress]:
    """A window for one row."""
    answers: list[Answer] = []
    window_id = WindowId(f"w-{request.row_id}")
    letters = (Letter(1, Admit(request)), Letter(2, LastCall()))
    await thread.run(lambda: lane.open(window_id, letters, answers.append))
    while not (answers and isinstance(answers[-1], Closed)):
        await thread.run(lane.step)
    return [row for answer in answers if isinstance(answer, Played) for row in answer.report.rows]


def said(rows: list[RowProgress]) -> tuple[int, ...]:
    return tuple(token for row in rows for token in row.tokens)


def test_a_second_turn_takes_its_features_to_the_drafter_in_its_first_draft() -> None:
    tokenizer, engine = Tokenizer.load(TARGET), LocalEngine()
    opener = engine.open_router(SETTINGS).card.message_opener

    def turn(name: str, chat: list[dict[str, str]]) -> RowRequest:
        ids, stops = tuple(tokenizer.apply_chat(chat)), tokenizer.eos_token_ids
        return RowRequest(RowId(name), ids, 32, stop_token_ids=stops, save_at=places_to_save(ids, opener))

    async def run() -> None:
        threads = MlxThread("drafter"), MlxThread("target")
        try:
            sessions = await threads[0].run(lambda: engine.open_drafter(SETTINGS))
            link, loop = ThreadLink(threads[0], sessions), asyncio.get_running_loop()
            parts = await threads[1].run(lambda: engine.open_target(SETTINGS, link, loop))
            chat = [SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
            first = await played(threads[1], parts.lane, turn("first", chat))
            chat.append({"role": "assistant", "content": tokenizer.decode(said(first))})
            chat.append({"role": "user", "content": QUESTIONS[1]})
            second = turn("second", chat)
            link.calls.clear()
            warm = await played(threads[1], parts.lane, second)
            (features,) = link.calls[0].features
            assert (features.start, features.count) == (0, len(second.tokens))
            assert sum(row.cached_tokens for row in warm) >= len(
                tokenizer.apply_chat(chat[:2], add_generation_prompt=False)
            )
            # Whoever wants numbers of the prompt has it read whole.
            read = replace(second, row_id=RowId("cold"), num_top_logprobs=0, wants_prompt_logprobs=True)
            cold = await played(threads[1], parts.lane, read)
            assert sum(row.cached_tokens for row in cold) == 0
            assert [(r.tokens, r.walked) for r in warm] == [(r.tokens, r.walked) for r in cold]
            assert sum(row.accepted for row in warm) > 0
        finally:
            for thread in threads:
                thread.stop()

    asyncio.run(run())
