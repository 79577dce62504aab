"""Remote lanes over real sockets: another cluster's gRPC port as a lane that dies, is cut off, or is slow."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from deployments.client import RpcEvent
from deployments.desk import Desk
from deployments.generation import Ended, Started, TextTokens
from deployments.messages import Admit, Closed, LastCall, Letter, Played, Returned
from deployments.remote import lane as remote_lane
from deployments.remote.lane import Caller, Model, RemoteLane
from deployments.remote.route import Via
from deployments.remote.window import RemoteWindow
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.stages import Stages
from dflash_core.errors import DeadlineExceeded, InvalidRequest, Unavailable
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from tests.deployments.other_cluster import OneOfTwo, OtherCluster, other_cluster
from tests.deployments.relay import relay_to
from tests.deployments.test_desk import TOKENIZER, collect, desk, expected, request, tokens

MODEL = Model(("dflash-embedded", "demo"), TOKENIZER.vocab_size, 1)
PERIOD_S = 0.05


@pytest.fixture(autouse=True)
def paces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.stages.PERIOD_S", PERIOD_S)
    monkeypatch.setattr(remote_lane, "TIMEOUT_S", 0.4)
    monkeypatch.setattr("deployments.remote.window.AGAIN_S", 0.05)


@asynccontextmanager
async def router(*ports: int, key: str | None = None, **options: float) -> AsyncIterator[tuple[Desk, Stages]]:
    """A router that has remote lanes and nothing else."""
    lanes = [RemoteLane(f"127.0.0.1:{port}", Caller("us", key), MODEL, 4) for port in ports]
    stages = Stages("r", None, lanes)
    d = desk(stages, **options)  # type: ignore[arg-type]
    stages.watch(d)
    try:
        yield d, stages
    finally:
        d.close()
        stages.close()
        await asyncio.gather(*stages._watches, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def playing(cluster: OtherCluster) -> int:
    return cluster.backend.desk.num_running


async def test_a_row_is_the_same_as_on_a_lane_of_ones_own() -> None:
    async with other_cluster() as other, router(other.port) as (d, stages):
        events = await collect(d, request(1, 20))
        assert isinstance(events[0], Started)
        assert events[0].lane == f"127.0.0.1:{other.port}"
        assert tokens(events) == expected(request(1, 20))
        end = events[-1]
        assert isinstance(end, Ended)
        assert (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 2, 20)
        assert end.usage.rounds == 19  # the first token is the prompt's
        assert stages.remote_states == {f"127.0.0.1:{other.port}": "ok"}
        asked = other.backend.asked[0]
        assert asked.stop_strings == ()
        assert asked.stop_token_ids == request(1).stop_token_ids


async def test_a_lane_is_named_where_its_serve_has_another_application_too() -> None:
    async with other_cluster(interceptors=[OneOfTwo()]) as other, router(other.port) as (d, stages):
        assert tokens(await collect(d, request(1, 20))) == expected(request(1, 20))
        assert stages.remote_states == {f"127.0.0.1:{other.port}": "ok"}


async def test_nothing_of_a_row_is_left_to_the_other_sides_defaults() -> None:
    sampling = Sampling(0.7, 20, 0.9, 0.05, 2**64 - 3, ((5, -1.5),), 1.1, 0.5, -0.25, 3)
    stops = frozenset({7, 9}) | TOKENIZER.eos_token_ids
    asked = replace(request(1), sampling=sampling, stop_token_ids=stops, num_top_logprobs=2)
    asked = replace(asked, grammar=json.dumps({"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}))
    async with other_cluster() as other, router(other.port) as (d, _):
        assert tokens(await collect(d, asked)) == expected(asked)
        there = other.backend.asked[0]
        assert (there.sampling, there.grammar) == (sampling, asked.grammar)
        assert (there.stop_token_ids, there.num_top_logprobs) == (asked.stop_token_ids, 2)
        assert (there.prompt_ids, there.max_tokens) == (asked.prompt_ids, asked.max_tokens)


async def test_a_killed_lanes_rows_go_on_elsewhere_where_they_were() -> None:
    asked = replace(
        request(1, 400), sampling=Sampling(temperature=1.0, seed=11, presence_penalty=1.0, min_tokens=390)
    )
    async with other_cluster() as first, other_cluster() as second, router(first.port, second.port) as (d, _):
        await until(lambda: d.num_lanes == 2)
        answers = [asyncio.ensure_future(collect(d, replace(asked, id=f"g{i}"))) for i in range(4)]  # type: ignore[arg-type]
        await until(lambda: playing(first) == playing(second) == 2)
        await until(lambda: all(len(t.committed) > 9 for w in d._windows for t in w.tickets.values()))
        await first.kill()
        for answer in answers:
            assert tokens(await answer) == expected(asked)
        moved = [generation for generation in second.backend.asked if generation.num_continued]
        assert len(moved) == 2
        for generation in moved:
            whole = asked.prompt_ids + tuple(expected(asked))
            assert generation.prompt_ids == whole[: len(generation.prompt_ids)]
            assert len(generation.prompt_ids) - generation.num_continued == len(asked.prompt_ids)
            assert generation.num_continued + generation.max_tokens == asked.max_tokens
            assert generation.sampling == asked.sampling  # min_tokens counts from the prompt's end again


async def test_a_watch_that_is_cancelled_while_an_answer_comes_ends() -> None:
    asked: list[asyncio.Future[bool]] = []

    class Client:
        def __init__(self, address: str, **options: object):
            pass

        def is_serving(self) -> "asyncio.Future[bool]":
            asked.append(asyncio.get_running_loop().create_future())
            return asked[-1]

        async def close(self) -> None:
            pass

    lane = RemoteLane("there:1", Caller("us"), MODEL, 4, Client)  # type: ignore[arg-type]
    watch = asyncio.ensure_future(lane.watch(lambda name, standings, state: None, 0.0))
    await until(lambda: asked)
    asked[0].set_result(False)
    watch.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(watch, return_exceptions=True)
    assert watch.cancelled()


async def test_a_link_that_is_cut_or_silent_costs_a_pause_and_no_token() -> None:
    async with other_cluster() as other, relay_to(other.port) as relay, router(relay.port) as (d, stages):
        running = asyncio.ensure_future(collect(d, request(1, 600)))
        await until(lambda: playing(other) == 1)
        relay.break_connections()
        await until(lambda: len(other.backend.asked) == 2)
        relay.hold()
        await until(lambda: "away" in stages.remote_states.values())
        assert d.num_lanes == 0
        relay.release()
        assert tokens(await running) == expected(request(1, 600))
        await until(lambda: playing(other) == 0)


async def test_where_no_lane_is_left_new_requests_hear_so_and_begun_answers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.stranded.PATIENCE_S", 0.3)
    async with other_cluster() as other, relay_to(other.port) as relay, router(relay.port) as (d, stages):
        running = asyncio.ensure_future(collect(d, request(1, 600)))
        await until(lambda: any(t.has_started for window in d._windows for t in window.tickets.values()))
        relay.hold()
        await until(lambda: "away" in stages.remote_states.values())
        with pytest.raises(
            Unavailable, match="no lane can take this request now: of the remote lanes 1 away"
        ):
            await collect(d, request(2))
        await until(lambda: d.num_waiting == 1)  # the one that has begun
        with pytest.raises(Unavailable):
            await collect(d, replace(request(3), deadline_s=0.1))  # at once: there has been none for long
        relay.release()
        assert tokens(await running) == expected(request(1, 600))
        assert tokens(await collect(d, request(4))) == expected(request(4))


async def test_a_slow_link_slows_and_changes_nothing() -> None:
    async with (
        other_cluster() as other,
        relay_to(other.port, delay_s=0.05) as relay,
        router(relay.port) as (d, _),
    ):
        answers = await asyncio.gather(*[collect(d, request(i, 30)) for i in range(3)])
    assert [tokens(a) for a in answers] == [expected(request(i, 30)) for i in range(3)]
    assert all(sum(isinstance(e, Started) for e in answer) == 1 for answer in answers)


async def test_no_more_rows_are_sent_than_there_is_room_for() -> None:
    async with other_cluster(max_rows=2, max_queue=0) as other, router(other.port, max_rows=8) as (d, _):
        answers = [asyncio.ensure_future(collect(d, request(i, 60))) for i in range(5)]
        await until(lambda: playing(other) == 2)
        assert d.num_waiting == 3
        assert [tokens(await a) for a in answers] == [expected(request(i, 60)) for i in range(5)]
        assert other.backend.desk.num_waiting == 0


async def test_a_full_lane_says_so_and_its_rows_wait_here() -> None:
    async with other_cluster(max_rows=1, max_queue=0) as other, router(other.port) as (d, _):
        own = asyncio.ensure_future(collect(d, request(1, 150)))
        await until(lambda: playing(other) == 1)
        d._board[f"127.0.0.1:{other.port}"].num_placed = -1  # as if it had told of room that is gone
        waiting = asyncio.ensure_future(collect(d, request(2, 10)))
        assert tokens(await waiting) == expected(request(2, 10))
        assert tokens(await own) == expected(request(1, 150))


async def test_a_lane_that_is_not_well_or_not_ours_gets_no_rows() -> None:
    states: list[str] = []
    async with (
        other_cluster() as ill,
        other_cluster(names=("another",)) as another,
        other_cluster(keys=("right",)) as locked,
        router(ill.port, another.port, locked.port, key="wrong") as (d, stages),
    ):
        ill.backend.status = "draining"
        await until(lambda: "unknown" not in stages.remote_states.values())
        states += stages.remote_states.values()
        waits = replace(request(1), deadline_s=0.2)
        with pytest.raises(DeadlineExceeded):
            await collect(d, waits)
        assert not any(c.backend.asked for c in (ill, another, locked))
        ill.backend.status = "ok"
        assert tokens(await collect(d, request(2))) == expected(request(2))
    assert states == ["not serving", "another model", "refuses our key"]


async def test_a_key_opens_a_locked_lane() -> None:
    async with other_cluster(keys=("right",)) as locked, router(locked.port, key="right") as (d, _):
        assert tokens(await collect(d, request(1))) == expected(request(1))


async def test_what_the_other_side_refuses_for_good_is_the_rows_own_end() -> None:
    long = replace(request(1), prompt_ids=tuple(range(300, 4390)), max_tokens=50)
    async with other_cluster() as other, router(other.port) as (d, _):
        beside = asyncio.ensure_future(collect(d, request(2, 100)))
        with pytest.raises(InvalidRequest, match="context is 4096"):
            await collect(d, long)
        assert tokens(await beside) == expected(request(2, 100))


async def test_a_client_that_leaves_frees_its_row_over_there() -> None:
    async with other_cluster() as other, router(other.port) as (d, _):
        events = d.play(request(1, 4000))
        async for event in events:
            if isinstance(event, TextTokens):
                break
        await events.aclose()
        await until(lambda: playing(other) == 0)


async def test_a_stop_string_is_found_here() -> None:
    async with other_cluster() as other, router(other.port) as (d, _):
        whole = text(await collect(d, request(1, 30)))
        events = await collect(d, request(1, 30, (whole[20:24],)))
        assert text(events) == whole[: whole.index(whole[20:24])]
        assert isinstance(events[-1], Ended)
        assert events[-1].stop_reason == whole[20:24]
        await until(lambda: playing(other) == 0)


def text(events: Sequence[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextTokens))


async def test_messages_that_are_read_together_keep_their_order() -> None:
    messages = (
        pb.Started(),
        pb.Tokens(tokens=[pb.Token(id=300, origin=pb.TOKEN_ORIGIN_BONUS)]),
        pb.Tokens(tokens=[pb.Token(id=i, origin=pb.TOKEN_ORIGIN_ACCEPTED) for i in (301, 302)]),
        pb.Tokens(tokens=[pb.Token(id=9, origin=pb.TOKEN_ORIGIN_BONUS)]),
        pb.Finished(reason=pb.FINISH_REASON_STOP, speculation=pb.Speculation(rounds=2, drafted=30, walked=4)),
    )

    async def call(_: RowRequest, via: Via) -> AsyncGenerator[RpcEvent, None]:
        for message in messages:
            yield message

    row = RowRequest(RowId("a"), (1, 2), 10, stop_token_ids=frozenset({9}))
    window = RemoteWindow(WindowId("w"), call, (Letter(1, Admit(row)), Letter(2, LastCall())))
    answers = [answer async for answer in window.play()]
    assert isinstance(answers.pop(), Closed)
    reports = [answer.report for answer in answers if isinstance(answer, Played)]
    progress = [row for report in reports for row in report.rows]
    assert [p.tokens for p in progress] == [(), (300,), (301, 302), (9,)]
    assert sum(report.live_rows for report in reports) == 2  # the prompt's own token is no round
    assert progress[-1].finish == "stop"
    assert (sum(p.drafted for p in progress), sum(p.accepted for p in progress)) == (30, 2)


async def test_a_row_whose_answer_stops_without_an_end_that_is_known_goes_elsewhere() -> None:
    async def call(request: RowRequest, via: Via) -> AsyncGenerator[RpcEvent, None]:
        yield pb.Started()
        yield pb.Tokens(tokens=[pb.Token(id=300)])

    row = RowRequest(RowId("a"), (1, 2), 10)
    window = RemoteWindow(WindowId("w"), call, (Letter(1, Admit(row)), Letter(2, LastCall())))
    async with asyncio.timeout(20):
        *_, returned, closed = [answer async for answer in window.play()]
    assert isinstance(returned, Returned)
    assert (returned.row_id, returned.was_playing) == (RowId("a"), True)
    assert isinstance(closed, Closed)


async def test_a_lane_with_a_shorter_context_says_both_numbers_and_what_to_do() -> None:
    model = replace(MODEL, max_context=8192)
    async with other_cluster() as other:
        lane = RemoteLane(f"127.0.0.1:{other.port}", Caller("us"), model, 4)
        try:
            assert await lane.ask() is None
        finally:
            await lane.close()
    assert lane.state == "serves a shorter context"
    assert lane.reason == "4096 tokens there, 8192 here: set max_context: 4096 here"
