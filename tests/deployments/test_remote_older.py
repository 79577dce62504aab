"""Lanes whose servers know less than we do: rows that ask more go elsewhere, or hear that there is none."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from deployments.client import AsyncClient, CallFailed, ask
from deployments.generation import Generation
from deployments.remote.lane import Caller, RemoteLane
from deployments.remote.route import HEADER
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.spec_fields import (
    UnknownField,
    fields_before_lists,
    known_fields,
    require_known,
    used_fields,
)
from dflash_core.errors import Unavailable
from dflash_core.request import Sampling
from tests.deployments.other_cluster import other_cluster
from tests.deployments.test_desk import collect, expected, request, tokens
from tests.deployments.test_remote import MODEL, paces, router, until

__all__ = ["paces"]  # the fixture of remote lanes' tests holds here too

GRAMMAR = '{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}'


def constrained(number: int) -> Generation:
    return replace(request(number, 20), grammar=GRAMMAR)


async def test_a_row_with_a_grammar_goes_to_the_lane_that_knows_what_that_is() -> None:
    async with (
        other_cluster(is_older=True) as old,
        other_cluster() as new,
        router(old.port, new.port) as (d, _),
    ):
        await until(lambda: d.num_lanes == 2)
        asked = [constrained(i) for i in range(4)]
        free = [request(i, 20) for i in range(4, 8)]
        answers = await asyncio.gather(*[collect(d, generation) for generation in asked + free])
        assert [tokens(answer) for answer in answers] == [expected(row) for row in asked + free]
        assert all(generation.grammar is None for generation in old.backend.asked)
        assert sum(generation.grammar == GRAMMAR for generation in new.backend.asked) == 4
        assert old.backend.asked  # what it can play it does


async def test_a_row_that_no_lane_knows_how_to_play_is_told_so_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.stranded.PATIENCE_S", 0.2)
    async with other_cluster(is_older=True) as old, router(old.port) as (d, _):
        await until(lambda: d.num_lanes == 1)
        refused = asyncio.ensure_future(collect(d, constrained(1)))
        assert tokens(await collect(d, request(2))) == expected(request(2))
        with pytest.raises(Unavailable, match=r"too old for structure, structure\.grammar"):
            await refused
        assert [generation.grammar for generation in old.backend.asked] == [None]
        assert "too old for rows with continued, logprobs.prompt, structure" in caplog.text


async def test_a_server_that_forgot_a_field_refuses_the_row_and_it_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was replaced by an older one between two questions; from this one on servers say so themselves."""

    def forgetful(message: Any, prefix: str = "spec") -> None:
        if message.HasField("structure") and not has_forgotten:
            has_forgotten.append(True)
            raise UnknownField("'spec' has fields that this server does not know: number 10")

    has_forgotten: list[bool] = []
    monkeypatch.setattr("deployments.rpc.service.require_known", forgetful)
    async with other_cluster() as one, other_cluster() as two, router(one.port, two.port) as (d, _):
        await until(lambda: d.num_lanes == 2)
        assert tokens(await collect(d, constrained(1))) == expected(constrained(1))
        assert has_forgotten
        assert len(one.backend.asked + two.backend.asked) == 1


async def test_a_field_from_the_future_is_refused_of_a_cluster_and_passed_over_of_a_client() -> None:
    spec = ask("demo", [1, 2], max_tokens=3)
    spec.sampling.temperature = 0
    spec.MergeFromString(bytes([0xF8, 0x07, 1]))  # field 127, a varint
    async with other_cluster() as other, AsyncClient(f"127.0.0.1:{other.port}") as client:
        events = [event async for event in client.generate(spec)]
        assert isinstance(events[-1], pb.Finished)
        with pytest.raises(CallFailed, match="number 127") as refused:
            await anext(client.generate(spec, metadata={HEADER: "a"}))
        assert (refused.value.code.name, refused.value.kind) == ("UNIMPLEMENTED", "unknown_field")


async def test_a_lane_is_asked_anew_what_it_knows_once_another_server_answers() -> None:
    class Client:
        cluster, knows = "first", sorted(known_fields())

        def __init__(self, address: str, **options: object):
            pass

        async def is_serving(self) -> bool:
            return True

        async def models(self) -> list[pb.Model]:
            sizes = {"max_context": MODEL.max_context, "vocabulary_size": MODEL.vocab_size}
            return [pb.Model(name="demo", obeyed_fields=self.knows, **sizes)]  # type: ignore[arg-type]

        async def stats(self, metadata: Mapping[str, str]) -> pb.GetStatsResponse:
            return pb.GetStatsResponse(room=3, cluster=self.cluster)

    lane = RemoteLane("there:1", Caller("us"), MODEL, 4, Client)  # type: ignore[arg-type]
    await lane.ask()
    assert lane._lacks == frozenset()
    Client.cluster, Client.knows = "", []  # as after a return to an older version
    await lane.ask()
    assert lane._lacks == known_fields() - fields_before_lists()


def test_a_field_that_is_unknown_anywhere_in_a_spec_is_found() -> None:
    inner: Callable[[], pb.GenerationSpec] = lambda: pb.GenerationSpec(  # noqa: E731
        chat=pb.Conversation(messages=[pb.Message(content="a")]), sampling=pb.Sampling(logit_bias={1: 2.0})
    )
    require_known(inner())
    for path, message in (("spec.sampling", inner().sampling), ("spec.chat.messages", None)):
        spec = inner()
        part = spec.sampling if message is not None else spec.chat.messages[0]
        part.MergeFromString(bytes([0xF8, 0x07, 1]))
        with pytest.raises(UnknownField, match=f"'{path}'"):
            require_known(spec)


def test_every_field_that_a_row_uses_has_a_name_in_the_list() -> None:
    spec = pb.GenerationSpec(continued=1, logprobs=pb.Logprobs(prompt=True))
    spec.structure.grammar = GRAMMAR
    used = used_fields(spec)
    assert used == {"continued", "logprobs", "logprobs.prompt", "structure", "structure.grammar"}
    assert used <= known_fields()
    assert used & fields_before_lists() == {"logprobs"}


async def test_an_answer_begun_elsewhere_is_not_sent_to_a_server_that_would_count_it_as_prompt() -> None:
    asked = replace(request(1, 400), sampling=Sampling(presence_penalty=1.0))
    async with other_cluster() as new, other_cluster(is_older=True) as old, other_cluster() as other:
        async with router(new.port, old.port, other.port) as (d, _):
            await until(lambda: d.num_lanes == 3)
            old_lane = d._board[f"127.0.0.1:{old.port}"]
            old_lane.is_pausing = True
            answer = asyncio.ensure_future(collect(d, asked))
            await until(lambda: any(len(t.committed) > 9 for w in d._windows for t in w.tickets.values()))
            old_lane.is_pausing = False
            dying = new if new.backend.desk.num_running else other
            await dying.kill()
            assert tokens(await answer) == expected(asked)
        assert old.backend.asked == []
