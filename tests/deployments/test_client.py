"""The client over real channels: what it sends with every call."""

import asyncio
from collections.abc import Callable

import pytest
from grpc import StatusCode

from deployments import client as rpc
from deployments.app import APP_NAME
from deployments.client import AsyncClient, CallFailed, Client, ask
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
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
