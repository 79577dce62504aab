"""Collecting what all routers show: who is asked, how often, and what of those who are silent."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.siblings import FRESH_S, Answers, Siblings
from deployments.telemetry import Statistics, render
from deployments.view import Overview, RouterView
from tests.deployments.virtual_time import VirtualTimeLoop

Result = TypeVar("Result")


class Routers:
    """This router and its siblings, as the network sees them."""

    def __init__(self) -> None:
        self.statistics = {name: Statistics("m", name) for name in ("own", "b", "a")}
        self.failures: list[BaseException] = []
        self.answer_s = 0.1
        self.num_asked = 0
        self.siblings = Siblings(self.own, self.ask)

    async def own(self, num_missing: int) -> RouterView:
        self.statistics["own"].observe_missing(num_missing)
        return self.view("own")

    def view(self, name: str) -> RouterView:
        return RouterView.now(self.statistics[name].snapshot())

    async def ask(self) -> Answers:
        self.num_asked += 1
        await asyncio.sleep(self.answer_s)
        return [*map(self.view, self.statistics), *self.failures]


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


@pytest.fixture
def routers() -> Routers:
    return Routers()


def run(loop: VirtualTimeLoop, work: Coroutine[Any, Any, Result]) -> Result:
    return loop.run_until_complete(work)


def engines(overview: Overview) -> list[str]:
    return [router.engine for router in overview.routers]


def test_the_asked_one_comes_first_and_nobody_twice(loop: VirtualTimeLoop, routers: Routers) -> None:
    overview = run(loop, routers.siblings.overview())
    assert (overview.asked, engines(overview), overview.num_missing) == ("own", ["own", "a", "b"], 0)


def test_all_who_ask_at_a_time_share_one_collection(loop: VirtualTimeLoop, routers: Routers) -> None:
    async def crowd() -> list[Overview]:
        return list(await asyncio.gather(*(routers.siblings.overview() for _ in range(20))))

    assert len({id(overview) for overview in run(loop, crowd())}) == 1
    run(loop, routers.siblings.overview())
    assert routers.num_asked == 1
    run(loop, asyncio.sleep(FRESH_S))
    run(loop, routers.siblings.overview())
    assert routers.num_asked == 2


def test_one_who_leaves_takes_nobodys_answer(loop: VirtualTimeLoop, routers: Routers) -> None:
    async def leave() -> Overview:
        first = asyncio.ensure_future(routers.siblings.overview())
        second = asyncio.ensure_future(routers.siblings.overview())
        await asyncio.sleep(routers.answer_s / 2)
        first.cancel()
        return await second

    assert engines(run(loop, leave())) == ["own", "a", "b"]


def test_a_dead_one_is_left_out_and_counted(loop: VirtualTimeLoop, routers: Routers) -> None:
    del routers.statistics["a"]
    routers.failures = [ConnectionError("died"), TimeoutError("hangs")]
    overview = run(loop, routers.siblings.overview())
    assert (engines(overview), overview.num_missing) == (["own", "b"], 2)
    values = overview.routers[0].snapshot.values
    assert values["dflash_routers_missing"] == {(): 2.0}


def test_if_nobody_can_be_asked_this_one_speaks_for_itself(loop: VirtualTimeLoop, routers: Routers) -> None:
    async def fail() -> Answers:
        raise RuntimeError("no cluster")

    routers.siblings = Siblings(routers.own, fail)
    assert engines(run(loop, routers.siblings.overview())) == ["own"]


def test_a_page_of_several_engines_tells_each_family_once(loop: VirtualTimeLoop, routers: Routers) -> None:
    overview = run(loop, routers.siblings.overview())
    page = render(router.snapshot for router in overview.routers).decode()
    lines = page.splitlines()
    for start in ("# HELP ", "# TYPE "):
        names = [line.split()[2] for line in lines if line.startswith(start)]
        assert len(names) == len(set(names)) > 20
    families = {family.name: family for family in text_string_to_metric_families(page)}
    running = families["vllm:num_requests_running"].samples
    assert [sample.labels["engine"] for sample in running] == ["own", "a", "b"]
