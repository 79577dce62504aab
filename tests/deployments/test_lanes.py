"""Several lanes at one desk, in virtual time: who plays where, and nobody waits while a lane has room."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from deployments.desk import Desk
from deployments.generation import Generation, GenerationId, Started
from deployments.lanes import Board, Standing
from deployments.messages import Answer, Letter, Opening, Refused
from deployments.placing import ROW_TOKENS
from deployments.scaling import FORGOTTEN_AFTER_S, ROWS, WAITING, Demand
from dflash_core.request import WindowId
from tests.deployments.test_desk import LocalStage, collect, desk, expected, request, tokens
from tests.deployments.virtual_time import VirtualTimeLoop


class Lanes:
    """A stage of several lanes, each a ``LocalStage``; where no lane is named, the first is as good."""

    is_anywhere_open = True

    def __init__(self, *names: str):
        self.stages = {name: LocalStage() for name in names}
        self.homes: dict[WindowId, LocalStage] = {}
        self.full: set[str] = set()

    def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        name = opening.lane or next(iter(self.stages))
        stage = self.homes[opening.window_id] = self.stages[name]
        return self._named(name, stage.play(opening))

    async def _named(self, name: str, answers: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        if name in self.full:
            yield Refused("lane_full", name)
            return
        async for answer in answers:
            yield replace(answer, lane=name) if hasattr(answer, "lane") else answer  # type: ignore[call-arg]

    def send(self, window_id: WindowId, letter: Letter) -> None:
        self.homes[window_id].send(window_id, letter)

    def forget(self, window_id: WindowId) -> None:
        pass

    async def mend(self) -> None:
        pass

    @property
    def rows(self) -> list[int]:
        return [stage.lane.num_rows for stage in self.stages.values()]


def play(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(work, 60))
    finally:
        loop.close()


def told(d: Desk, *names: str, **fields: Any) -> None:
    d.hear("targets", [Standing(name, **fields) for name in names])


def served(*names: str, max_rows: int) -> tuple[Lanes, Desk]:
    """Lanes and a desk that knows of them all."""
    stage = Lanes(*names)
    d = desk(stage, max_rows=max_rows)  # type: ignore[arg-type]
    told(d, *names)
    return stage, d


def test_requests_for_two_windows_play_on_two_lanes_at_once() -> None:
    async def work() -> None:
        stage, d = served("a", "b", max_rows=3)
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(6)]
        await asyncio.sleep(0.01)
        assert stage.rows == [3, 3]
        assert d.num_waiting == 0
        assert [tokens(await a) for a in answers] == [expected(request(i, 60)) for i in range(6)]
        assert all(len(s.openings[0].letters) == 1 for s in stage.stages.values())  # one window each

    play(work())


def test_where_two_windows_are_faster_the_rows_of_one_are_shared_between_two() -> None:
    async def work() -> None:
        stage = Lanes("a")
        d = desk(stage, max_rows=5)  # type: ignore[arg-type]
        told(d, "a", favours_two=True)
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(7)]
        await asyncio.sleep(0.01)
        assert len(stage.stages["a"].openings) == 2
        assert (stage.rows, d.num_waiting) == ([6], 1)
        assert [tokens(await a) for a in answers] == [expected(request(i, 60)) for i in range(7)]

    play(work())


def test_few_rows_stay_in_one_window_even_where_two_are_faster() -> None:
    async def work() -> None:
        stage = Lanes("a")
        d = desk(stage, max_rows=5)  # type: ignore[arg-type]
        told(d, "a", favours_two=True)
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(3)]
        await asyncio.gather(*answers)
        assert len(stage.stages["a"].openings) == 1

    play(work())


def test_a_lane_that_is_new_is_not_given_more_than_its_share() -> None:
    async def work() -> None:
        stage = Lanes("a", "b")
        d = desk(stage, max_rows=16)  # type: ignore[arg-type]
        told(d, "a")
        await collect(d, request(0))
        told(d, "a", "b")
        answers = [asyncio.ensure_future(collect(d, request(i))) for i in range(1, 13)]
        await asyncio.sleep(0.001)
        assert stage.rows == [6, 6]
        assert all([await answer for answer in answers])

    play(work())


def chat(number: int, turns: int, common: int = 0, own: int = 320) -> Generation:
    """A prompt of a chat: what all chats begin with, and so many tokens of its own for each turn."""
    prompt_ids = (*range(300, 300 + common), *((7 * number + i) % 200 + 10 for i in range(turns * own)))
    return replace(request(number, 20), id=GenerationId(f"g{number}.{turns}"), prompt_ids=prompt_ids)


async def lane_of(d: Desk, generation: Generation) -> str:
    return next(event.lane for event in await collect(d, generation) if isinstance(event, Started))


def test_the_next_turn_of_a_chat_goes_to_the_lane_that_read_the_last_one() -> None:
    async def work() -> None:
        stage, d = served("a", "b", "c", max_rows=4)
        first = await asyncio.gather(*[lane_of(d, chat(i, 1, common=64)) for i in range(9)])
        assert sorted(first) == [*"aaabbbccc"]
        for number in reversed(range(9)):
            assert await lane_of(d, chat(number, 2, common=64)) == first[number]

    play(work())


def test_a_prompt_that_all_share_does_not_gather_them_on_one_lane() -> None:
    async def work() -> None:
        stage, d = served("a", "b", max_rows=16)
        await lane_of(d, chat(0, 0, common=256))
        answers = [asyncio.ensure_future(collect(d, chat(i, 1, 256, own=1))) for i in range(1, 13)]
        await asyncio.sleep(0.001)
        assert max(stage.rows) - min(stage.rows) <= 256 // ROW_TOKENS
        assert all([await answer for answer in answers])

    play(work())


def test_a_chat_goes_elsewhere_where_its_lane_is_full_or_gone() -> None:
    async def work() -> None:
        stage, d = served("a", "b", max_rows=2)
        home = await lane_of(d, chat(0, 1))
        other = "b" if home == "a" else "a"
        again = [replace(chat(0, 1), id=GenerationId(f"again{i}")) for i in range(2)]
        beside = [asyncio.ensure_future(collect(d, generation)) for generation in again]
        await asyncio.sleep(0.001)
        assert stage.rows == ([2, 0] if home == "a" else [0, 2])
        assert await lane_of(d, chat(0, 2)) == other
        await asyncio.gather(*beside)
        d.hear("targets", [Standing(home, room=0), Standing(other)])
        assert await lane_of(d, chat(1, 1)) == other
        told(d, other)
        assert await lane_of(d, chat(0, 3)) == other

    play(work())


def test_a_queue_takes_a_lane_that_is_new() -> None:
    async def work() -> None:
        stage = Lanes("a", "b")
        d = desk(stage, max_rows=2)  # type: ignore[arg-type]
        told(d, "a")
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(4)]
        await asyncio.sleep(0.01)
        assert (stage.rows, d.num_waiting, d.room) == ([2, 0], 2, 0)
        told(d, "a", "b")
        await asyncio.sleep(0.01)
        assert (stage.rows, d.num_waiting) == ([2, 2], 0)
        assert [tokens(await a) for a in answers] == [expected(request(i, 60)) for i in range(4)]

    play(work())


def test_a_lane_that_is_gone_gets_no_rows_and_ends_those_it_has() -> None:
    async def work() -> None:
        stage, d = served("a", "b", max_rows=8)
        before = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(4)]
        await asyncio.sleep(0.01)
        told(d, "b")
        after = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(4, 7)]
        await asyncio.sleep(0.01)
        assert stage.rows == [2, 5]
        for number, answer in enumerate([*before, *after]):
            assert tokens(await answer) == expected(request(number, 60))

    play(work())


def test_a_refusal_sends_rows_to_the_other_lane_at_once() -> None:
    async def work() -> None:
        stage = Lanes("a", "b")
        stage.full = {"a"}
        d = desk(stage, max_rows=4)  # type: ignore[arg-type]
        told(d, "a", "b")
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(4)]
        await asyncio.sleep(0.02)  # less than the pause after a refusal
        assert stage.rows == [0, 4]
        lanes = {e.lane for a in answers for e in await a if isinstance(e, Started)}
        assert lanes == {"b"}

    play(work())


def test_the_rows_of_a_lost_lane_go_on_elsewhere_at_once() -> None:
    async def work() -> None:
        stage, d = served("a", "b", max_rows=4)
        stage.stages["a"].breaks_after = [5]
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(4)]
        await asyncio.sleep(0.02)
        assert stage.rows == [0, 4]
        assert [tokens(await a) for a in answers] == [expected(request(i, 60)) for i in range(4)]

    play(work())


@pytest.mark.parametrize(
    ("slow", "quick", "place"),
    [
        ({"round_s": 0.2}, {"round_s": 0.05}, "quick"),
        ({"round_s": 0.2}, {"round_s": 0.15, "num_rows": 16}, "slow"),  # another router's rows count
        ({"round_s": 0.2}, {"round_s": 0.05, "room": 0}, "slow"),
    ],
)
def test_a_row_goes_where_the_least_wait_is_expected(
    slow: dict[str, Any], quick: dict[str, Any], place: str
) -> None:
    async def work() -> None:
        stage = Lanes("slow", "quick")
        d = desk(stage)  # type: ignore[arg-type]
        d.hear("targets", [Standing("slow", **slow), Standing("quick", **quick)])
        events = await collect(d, request(1))
        assert [e.lane for e in events if isinstance(e, Started)] == [place]

    play(work())


def test_a_source_speaks_for_its_own_lanes_alone() -> None:
    board = Board(4)
    board.hear("targets", [Standing("a"), Standing("b", max_rows=2)])
    board.hear("far:9000", [Standing("far:9000", room=9)])
    board.hear("targets", [Standing("b")])
    assert [lane.name for lane in board] == ["b", "far:9000"]
    assert board["b"].max_rows == 2
    board.hear("targets", [])
    board.hear("far:9000", [])
    assert list(board) == []


def test_places_may_be_reckoned_with_somewhere_until_the_targets_have_had_a_word() -> None:
    assert list(Board(4, is_anywhere_open=False).promising) == []
    board = Board(4)
    board.hear("far:9000", [])
    assert [lane.name for lane in board.promising] == [""]
    board.hear("targets", [])
    assert list(board.promising) == []


def test_a_lane_that_a_window_was_opened_on_is_gone_when_the_targets_do_not_name_it() -> None:
    board = Board(4)
    board.add("a", 2)
    board.hear("far:9000", [])
    assert "a" in board
    board.hear("targets", [])
    assert "a" not in board


def test_the_queues_that_routers_tell_of_add_up_and_are_forgotten() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    demand.hear("one", 3)
    demand.hear("two", 4)
    demand.hear("one", 1)
    assert demand.figures(7) == {ROWS: 7.0, WAITING: 5.0}
    now = FORGOTTEN_AFTER_S - 1
    demand.hear("two", 4)
    now = FORGOTTEN_AFTER_S + 1
    assert demand.figures(7) == {ROWS: 7.0, WAITING: 4.0}
