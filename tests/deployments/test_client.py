"""The client over real channels: what it sends with every call, and what it makes of an answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from deployments import client as rpc
from deployments.app import APP_NAME
from deployments.client import AsyncClient, CallFailed, Client, ask
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.dflash.v1.dflash_pb2_grpc import (
    DFlashServiceServicer,
    add_DFlashServiceServicer_to_server,
)
from tests.deployments.other_cluster import OneOfTwo, other_cluster

SPEC = ask("demo", [1, 2], max_tokens=3)
CALLS: tuple[Callable[[Client], object], ...] = (
    lambda client: list(client.generate(SPEC)),
    lambda client: client.generate_once(SPEC),
    lambda client: client.models(),
    lambda client: client.stats(),
)


async def test_every_call_names_the_application_which_serve_asks_for_where_it_has_two() -> None:
    async with other_cluster(interceptors=[OneOfTwo()]) as server:
        address = f"127.0.0.1:{server.port}"
        async with AsyncClient(address) as client:
            assert [event async for event in client.generate(SPEC)]
            assert (await client.generate_once(SPEC)).finished.usage.completion_tokens == 3
            assert await client.models()
            assert (await client.stats()).state == pb.SERVER_STATE_OK
            assert await client.is_serving()
        with Client(address) as client:
            for call in CALLS:
                assert await asyncio.to_thread(call, client)


@pytest.mark.parametrize("application", [None, "another"])
async def test_the_name_of_the_application_can_be_chosen(application: str | None) -> None:
    async with other_cluster(interceptors=[OneOfTwo()]) as server:
        with Client(f"127.0.0.1:{server.port}", application=application) as client:
            for call in CALLS:
                with pytest.raises(CallFailed) as failed:
                    await asyncio.to_thread(call, client)
                assert (failed.value.code, failed.value.kind) == (StatusCode.NOT_FOUND, "connection")
        async with AsyncClient(f"127.0.0.1:{server.port}", application=application) as client:
            with pytest.raises(CallFailed):
                await client.is_serving()


def test_calls_name_what_the_application_is_deployed_as() -> None:
    assert rpc.APPLICATION == APP_NAME


class Newer(DFlashServiceServicer):
    """A server of tomorrow, whose stream has events of a kind that is not known here."""

    unknown = bytes([0x9A, 0x06, 0])  # field 99, an empty message

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        yield pb.GenerateResponse(started=pb.Started(id="a"))
        yield pb.GenerateResponse.FromString(self.unknown)
        yield pb.GenerateResponse(tokens=pb.Tokens(text="Hi"))
        yield pb.GenerateResponse.FromString(self.unknown)
        yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))


async def test_events_of_a_kind_that_is_not_known_are_passed_over() -> None:
    server = grpc.aio.server()
    add_DFlashServiceServicer_to_server(Newer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address) as client:
        events = [event async for event in client.generate(SPEC)]
    with Client(address) as blocking:
        same = await asyncio.to_thread(lambda: list(blocking.generate(SPEC)))
    await server.stop(None)
    assert [type(event) for event in events] == [pb.Started, pb.Tokens, pb.Finished]
    assert same == events
