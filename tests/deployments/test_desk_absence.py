"""A desk whose target goes away and comes back, in virtual time: who waits, who is refused, who is first."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.desk import SCOUT_S, Desk
from deployments.generation import Ended, Event, Generation
from deployments.lanes import Standing
from deployments.messages import Answer, Opening
from dflash_core.errors import DeadlineExceeded, QueueFull
from tests.deployments.test_desk import LocalStage, admitted, collect, desk, expected, request, tokens
from tests.deployments.test_lanes import Lanes, play, told


class FleetingStage(LocalStage):
    """Its target goes and comes back; a call waits for it meanwhile, as one of a Serve handle does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = asyncio.Event()
        self.is_there.set()

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        await self.is_there.wait()
        async with aclosing(super().play(opening)) as answers:
            async for answer in answers:
                if not self.is_there.is_set():
                    raise ConnectionError("replica died")
                yield answer


def ask(d: Desk, *generations: Generation) -> list["asyncio.Task[list[Event]]"]:
    return [asyncio.ensure_future(collect(d, generation)) for generation in generations]


async def lost(stage: FleetingStage, d: Desk) -> None:
    """The target is gone, and the desk has been told so."""
    stage.is_there.clear()
    await asyncio.sleep(0.2)
    told(d)


async def playing(max_queue: int) -> tuple[FleetingStage, Desk, list["asyncio.Task[list[Event]]"]]:
    """Four rows on the lane of a desk, which is full."""
    stage = FleetingStage()
    d = desk(stage, max_rows=4, max_queue=max_queue)
    told(d, "lane")
    rows = ask(d, *[request(i, 300) for i in range(4)])
    await asyncio.sleep(0.05)
    return stage, d, rows


def num_refused(answers: list["asyncio.Task[list[Event]]"]) -> int:
    return sum(answer.done() and isinstance(answer.exception(), QueueFull) for answer in answers)


def test_rows_that_wait_for_their_target_count_against_the_queue() -> None:
    async def work() -> None:
        stage, d, moved = await playing(max_queue=6)
        assert (d.num_running, d.num_waiting) == (4, 0)
        stage.is_there.clear()
        await asyncio.sleep(0.2)  # their call is under way again, and the loss is not known yet
        assert (d.num_running, d.num_waiting) == (0, 4)
        new = ask(d, *[request(10 + i, 50) for i in range(2)])
        await asyncio.sleep(0.01)
        told(d)
        new += ask(d, *[request(20 + i, 50) for i in range(6)])
        await asyncio.sleep(0.2)
        assert num_refused(new) == num_refused(new[2:]) == 6
        assert (d.num_running, d.num_waiting, d.room, d.num_lanes) == (0, 6, 0, 0)
        assert d.drain() == 6
        stage.is_there.set()
        assert [tokens(await answer) for answer in moved] == [expected(request(i, 300)) for i in range(4)]
        assert [tokens(await a) for a in new[:2]] == [expected(request(10 + i, 50)) for i in range(2)]

    play(work())


def test_rows_that_lost_their_target_are_the_first_that_it_has_back_and_no_more_than_it_holds() -> None:
    async def work() -> None:
        stage, d, moved = await playing(max_queue=8)
        await lost(stage, d)
        new = ask(d, *[request(10 + i, 50) for i in range(4)])
        await asyncio.sleep(5)
        told(d)
        num_before = len(admitted(stage))
        stage.is_there.set()
        most = 0
        while not all(answer.done() for answer in (*moved, *new)):
            await asyncio.sleep(0.001)
            most = max(most, stage.lane.num_rows)
        assert most == 4
        again = [row.row_id for row in admitted(stage)][num_before:]
        assert again == [f"g{i}" for i in (0, 1, 2, 3, 10, 11, 12, 13)]
        assert all(isinstance(answer.result()[-1], Ended) for answer in (*moved, *new))

    play(work())


def test_rows_whose_target_comes_too_late_end_at_their_deadline() -> None:
    async def work() -> None:
        stage = FleetingStage()
        d = desk(stage, max_rows=2)
        told(d, "lane")
        [moved] = ask(d, request(1, 5000, deadline_s=3.0))
        await asyncio.sleep(0.05)
        await lost(stage, d)
        await asyncio.wait({moved})
        assert isinstance(moved.exception(), DeadlineExceeded)
        assert (d.num_running, d.num_waiting) == (0, 0)
        stage.is_there.set()
        await asyncio.sleep(0.1)
        assert stage.lane.num_rows == 0

    play(work())


def test_before_anything_is_known_a_lane_and_a_queue_are_filled() -> None:
    async def work() -> None:
        stage = FleetingStage()
        d = desk(stage, max_rows=4, max_queue=2)
        assert d.room == 4
        answers = ask(d, *[request(i, 60) for i in range(7)])
        await asyncio.sleep(0.01)
        assert num_refused(answers) == num_refused(answers[6:]) == 1
        assert (d.num_running, d.num_waiting) == (4, 2)
        assert [tokens(await a) for a in answers[:6]] == [expected(request(i, 60)) for i in range(6)]
        assert len(stage.openings) == 1

    play(work())


def test_a_lane_that_is_heard_of_gets_the_rows_of_a_call_that_nobody_takes() -> None:
    async def work() -> None:
        stage = Lanes("a", "b")
        away = stage.stages["a"] = FleetingStage()
        d = desk(stage, max_rows=2)  # type: ignore[arg-type]
        told(d, "a")
        moved = ask(d, *[request(i, 300) for i in range(2)])
        await asyncio.sleep(0.05)
        away.is_there.clear()
        await asyncio.sleep(0.2)
        assert (d.num_running, d.num_waiting) == (0, 2)
        told(d, "b")
        await asyncio.sleep(0.01)
        assert stage.rows == [0, 2]
        assert [tokens(await answer) for answer in moved] == [expected(request(i, 300)) for i in range(2)]
        assert away.lane.num_windows == 0

    play(work())


def test_a_window_that_looks_for_a_lane_in_vain_keeps_nobody_from_those_that_are_known() -> None:
    async def work() -> None:
        stage = Lanes("a", "b")
        away = stage.stages["a"] = FleetingStage()
        away.is_there.clear()
        d = desk(stage, max_rows=2)  # type: ignore[arg-type]
        [answer] = ask(d, request(1))
        await asyncio.sleep(SCOUT_S / 2)
        told(d, "b")
        await asyncio.sleep(0.01)
        assert d.num_waiting == 1  # a moment's patience: it is about to be opened, or was
        await asyncio.sleep(SCOUT_S)
        d.hear("targets", [Standing("b")])
        assert tokens(await answer) == expected(request(1))

    play(work())
