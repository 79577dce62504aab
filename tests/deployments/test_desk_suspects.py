"""A row that breaks what plays it, in virtual time: it ends, and those that played beside it end whole."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.lanes import Standing
from deployments.messages import Answer, Closed, Opened, Opening
from deployments.ticket import MAX_FRUITLESS_MOVES
from dflash_core.errors import RowFailed
from dflash_core.request import RowId
from tests.deployments.test_desk import LocalStage, collect, desk, expected, request, tokens
from tests.deployments.test_lanes import play


class BreakingStage(LocalStage):
    """A window that plays one of these rows fails; ``crashes``: all windows of the target die with it."""

    def __init__(self, *culprits: str, crashes: bool = False) -> None:
        super().__init__()
        self.culprits = {RowId(name) for name in culprits}
        self.crashes = crashes
        self.num_breaks = 0

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        before = self.num_breaks
        async with aclosing(super().play(opening)) as answers:
            async for answer in answers:
                if not isinstance(answer, Opened):
                    window = self.lane._windows[opening.window_id].window
                    if self.culprits & window._rows.keys():  # type: ignore[attr-defined]
                        self.num_breaks += 1
                        if not self.crashes:
                            yield Closed("failed", "a processor raised")
                            return
                    if self.crashes and self.num_breaks > before:
                        raise ConnectionError("replica died")
                yield answer


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("culprits", [("g1",), ("g2",), ("g0", "g3")])
def test_a_row_that_breaks_its_window_or_target_ends_alone(culprits: tuple[str, ...], crashes: bool) -> None:
    async def work() -> None:
        stage = BreakingStage(*culprits, crashes=crashes)
        d = desk(stage, max_rows=4)
        d.hear("targets", [Standing("lane")])
        asked = [request(i, 100, deadline_s=50.0) for i in range(5)]  # one waits for a place
        answers = [asyncio.ensure_future(collect(d, generation)) for generation in asked]
        await asyncio.wait(answers)
        for generation, answer in zip(asked, answers, strict=True):
            if generation.id in culprits:
                assert isinstance(answer.exception(), RowFailed)
            else:
                assert tokens(answer.result()) == expected(generation)
        assert stage.num_breaks <= (MAX_FRUITLESS_MOVES + 1) * len(culprits)
        assert (d.num_running, d.num_waiting, stage.lane.num_rows) == (0, 0, 0)

    play(work())


class StumblingStage(LocalStage):
    """Its target dies some times before a row has a token."""

    def __init__(self, num_deaths: int) -> None:
        super().__init__()
        self.num_deaths = num_deaths

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        self.num_deaths -= 1
        has_died = self.num_deaths >= 0
        async with aclosing(super().play(opening)) as answers:
            async for answer in answers:
                yield answer
                if has_died:
                    raise ConnectionError("replica died")


def test_rows_that_lost_their_target_for_no_fault_of_theirs_share_a_window_again() -> None:
    async def work() -> None:
        stage = StumblingStage(3)
        d = desk(stage, max_rows=4)
        d.hear("targets", [Standing("lane")])
        asked = [request(i, 100) for i in range(4)]
        answers = [asyncio.ensure_future(collect(d, generation)) for generation in asked]
        assert [tokens(await answer) for answer in answers] == [expected(generation) for generation in asked]
        # All of them (three by mail), all again, one alone, which died once more, and one that others joined.
        assert [len(opening.letters) for opening in stage.openings] == [1, 4, 1, 1]

    play(work())
