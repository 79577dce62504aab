"""Clusters that name each other, or themselves, as lanes: rows go on and never round, and it is told."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import pytest

from deployments.client import AsyncClient, CallFailed, RpcEvent, Tokens, ask
from deployments.generation import Generation
from deployments.remote.lane import Caller, RemoteLane
from deployments.remote.route import HEADER, MAX_PASSED, Route, best, is_closed, parse_via
from deployments.stages import Stages
from dflash_core.errors import Unavailable
from tests.deployments.linked_clusters import ROWS, Cluster, linked
from tests.deployments.test_desk import expected, request, tokens
from tests.deployments.test_remote import MODEL, paces

__all__ = ["paces"]  # the fixture of remote lanes' tests holds here too

BACK = "no targets but by way of this cluster"


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def is_ok(cluster: Cluster) -> bool:
    return (await cluster.health())["status"] == "ok"


async def play(cluster: Cluster, generation: Generation) -> list[int]:
    return tokens([event async for event in cluster.router.generate(generation)])


async def is_told(cluster: Cluster, lane: Cluster, state: str) -> bool:
    return cluster.router._stages.remote_states[lane.address] == state


async def test_two_clusters_that_name_each_other_share_their_rows_and_none_goes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dflash.remote")
    async with linked(monkeypatch, {"a": "b", "b": "a"}, playing="ab") as clusters:
        a, b = clusters["a"], clusters["b"]

        async def know_each_other() -> bool:
            healths = [await a.health(), await b.health()]
            is_known = all(health["remote_circles"] and health["lanes"] == 2 for health in healths)
            return is_known and "none goes back" in caplog.text

        await until(know_each_other)
        assert (await a.health())["remote_circles"] == [b.id]
        rows = [request(i, 40) for i in range(2 * ROWS + 2)]
        answers = await asyncio.gather(*[play(a, row) for row in rows])
        assert answers == [expected(row) for row in rows]
        assert a.num_played
        assert b.num_played
        assert {generation.via for generation in b.asked} == {(a.id,)}
        assert [generation for generation in a.asked if generation.via] == []  # full as it was


async def test_room_that_clusters_tell_each_other_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch, {"a": "b", "b": "c", "c": "a"}, playing="abc") as clusters:
        a = clusters["a"]

        async def knows_all() -> bool:
            return (await a.health())["room"] == 3 * ROWS

        await until(knows_all)
        await asyncio.sleep(0.5)  # ten times round
        assert await knows_all()


@pytest.mark.parametrize("lanes", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}])
async def test_clusters_without_targets_do_not_take_each_other_for_well(
    monkeypatch: pytest.MonkeyPatch, lanes: dict[str, str]
) -> None:
    monkeypatch.setattr("deployments.stranded.PATIENCE_S", 0.3)
    async with linked(monkeypatch, lanes, playing="") as clusters:
        a = clusters["a"]
        with pytest.raises(Unavailable, match=f"1 (not serving|this very cluster|{BACK})"):
            await play(a, request(1))
        assert [(await cluster.health())["status"] for cluster in clusters.values()] == ["loading"] * len(
            lanes
        )


async def test_a_circle_whose_last_targets_die_is_not_well_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(monkeypatch, {"a": "b", "b": "ca", "c": "a"}, playing="c") as clusters:
        a, b, c = clusters.values()
        await until(lambda: is_ok(a))
        assert await play(a, request(1)) == expected(request(1))
        c.targets.is_up = False

        async def is_over() -> bool:
            return not any([await is_ok(cluster) for cluster in (a, b, c)])

        await until(is_over)


async def test_a_lane_that_is_the_cluster_itself_gets_no_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dflash.remote")
    async with linked(monkeypatch, {"a": "a"}, playing="a") as clusters:
        a = clusters["a"]

        await until(lambda: is_told(a, a, "this very cluster"))
        assert "this very cluster" in caplog.text
        rows = [request(i, 20) for i in range(2 * ROWS)]
        assert await asyncio.gather(*[play(a, row) for row in rows]) == [expected(row) for row in rows]
        assert not any(generation.via for generation in a.asked)


async def test_rows_pass_through_a_cluster_and_not_through_one_that_they_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked(monkeypatch, {"a": "b", "b": "ac", "c": ""}, playing="c") as clusters:
        a, b, c = clusters.values()
        await until(lambda: is_ok(a))
        assert await play(a, request(1)) == expected(request(1))
        assert [generation.via for generation in c.asked] == [(a.id, b.id)]

        await until(lambda: is_told(b, a, BACK))


async def test_a_row_that_has_been_here_is_played_here_or_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked(monkeypatch, {"a": "b", "b": "", "c": "b"}, playing="ab") as clusters:
        a, b, c = clusters.values()
        await until(lambda: is_ok(c))
        await until(lambda: is_ok(a))
        for via in (c.id, "x,y,z"):
            async with AsyncClient(c.address) as client:
                events = client.generate(ask("demo", [1, 2], max_tokens=3), metadata={HEADER: via})
                with pytest.raises(CallFailed, match="UNAVAILABLE: the row has passed") as refused:
                    await anext(events)
                assert (refused.value.kind, refused.value.retry_after) == ("circular", 5)
        own = a.router._desk._board["lane"]
        for via in (a.id, "x,y,z", f"x,{b.id}"):  # the last one may go no other way
            own.is_pausing = True
            async with AsyncClient(a.address) as client:
                events = client.generate(ask("demo", [1, 2], max_tokens=3), metadata={HEADER: via})
                answer = asyncio.ensure_future(read(events))
                await asyncio.sleep(0.1)  # while b has room
                assert not answer.done()
                a.router._desk._resume(own)
                assert await answer == expected(request(2, 3))
        assert b.asked == []


async def read(events: AsyncGenerator[RpcEvent, None]) -> list[int]:
    return [token.id async for event in events if isinstance(event, Tokens) for token in event.tokens]


async def test_a_refused_row_goes_to_another_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lane tells of its ways may be old: it refuses then, and nothing is lost but the time."""
    async with linked(monkeypatch, {"a": "bc", "b": "c", "c": ""}, playing="c") as clusters:
        a, b, c = clusters.values()
        await until(lambda: is_ok(b))
        await until(lambda: is_ok(a))
        came = replace(request(1), via=("x", b.id))  # as of a cluster whose word on its way here is old
        monkeypatch.setattr("deployments.remote.terms.RemoteTerms.objection", lambda self, ticket: None)
        a.router._desk._board[c.address].is_pausing = True
        answer = asyncio.ensure_future(play(a, came))

        async def has_refused() -> bool:
            return bool(b.asked)

        await until(has_refused)
        a.router._desk._resume(a.router._desk._board[c.address])
        assert await answer == expected(came)
        assert [generation.via for generation in c.asked] == [("x", b.id, a.id)]


def test_the_way_that_is_told_is_the_shortest_that_leads_round_whoever_asks() -> None:
    near, far = (RemoteLane(name, Caller("us"), MODEL, 4) for name in ("near:1", "far:1"))
    near.routes, far.routes = (
        (Route(("a", "d"), 2),),
        (Route(("b", "c", "d"), 2), Route(("b", "d"), 1), Route(("e",), 1)),
    )
    known = Stages("r", None, [near, far])
    ours = Route(("us",), 7)
    assert list(known.routes(ours, "us", ())) == [
        ours,
        Route(("us", "e"), 1),
        Route(("us", "a", "d"), 2),
    ]
    assert Route(("us", "b", "d"), 1) in known.routes(None, "us", ("a",))
    assert not any(len(route.clusters) > 2 for route in known.routes(None, "us", ("x", "a")))


def test_the_shortest_way_to_each_cluster_is_the_one_to_tell() -> None:
    routes = [Route(("b", "d"), 3), Route(("d",), 4), Route(("c",), 1), Route(("b", "c"), 9)]
    assert best(routes) == [Route(("d",), 4), Route(("c",), 1)]


def test_a_way_is_open_to_rows_that_have_passed_nothing_on_it_and_have_not_gone_too_far() -> None:
    way = Route(("b", "c"), 1)
    assert way.is_open(("a",))
    assert not way.is_open(("c", "a"))
    assert Route(("b",), 1).is_open(("x", "y", "a"))
    assert not way.is_open(("x", "y", "a"))  # four clusters: c would be the fifth
    assert not is_closed(("x", "a"), "b")
    assert is_closed(("b", "a"), "b")
    assert is_closed(("x", "y", "a"), "b")


@pytest.mark.parametrize("text", [b"a", "a," * 2000, 7])
def test_a_header_that_is_none_of_ours_ends_the_way_here(text: object) -> None:
    assert is_closed(parse_via(text), "b")
    assert len(parse_via(text)) == MAX_PASSED


def test_no_header_is_no_way() -> None:
    assert parse_via(None) == parse_via("") == ()
    assert parse_via("a, b") == ("a", "b")


async def test_health_counts_remote_lanes_by_state_and_tells_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked(monkeypatch, {"a": "bc", "b": "a", "c": ""}, playing="ab") as clusters:
        a, b, c = clusters.values()
        await c.server.stop(None)

        async def knows_all() -> bool:
            health = await a.health()
            return health["remote_lanes"] == {"ok": 1, "away": 1} and health["remote_circles"] == [b.id]

        await until(knows_all)
        told = json.dumps(await a.health(), default=str)
        assert not any(cluster.address in told for cluster in (a, b, c))
