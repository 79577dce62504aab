"""Bytes that are no message, over a real channel: the client's fault, not the server's."""

import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from grpc import StatusCode
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployments.rpc.boundary import answered, streamed
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.options import MLX_SERVICE, OUR_SERVICE, grpc_options
from deployments.rpc.servicers import Unreadable, add_dflash, add_mlx_engine, is_ours
from dflash_core.errors import InvalidRequest
from tests.fuzz.edges import check_grpc, grpc_context, grpc_services

GARBAGE = [
    b"\xff",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0a\x05abc",
    b"\x08" + b"\x80" * 20,
    b"{}" * 999,
]


class OverTheWire:
    """Both contracts as Serve's proxy has them: each call goes to a replica, pickled."""

    async def _whole(self, method: Callable[..., Any], request: Any, wire: Any) -> Any:
        context = grpc_context()
        request = pickle.loads(pickle.dumps(request))
        answer = await answered(context, method(request, context))
        if context.code() is not None:
            check_grpc(context)
            await wire.abort(context.code(), context.details())
        return answer

    async def GenerateOnce(self, request: Any, wire: Any) -> Any:  # noqa: N802
        return await self._whole(_generate_once, request, wire)

    async def Generate(self, request: Any, wire: Any) -> AsyncIterator[Any]:  # noqa: N802
        ours, smgs = grpc_services()
        context = grpc_context()
        request = pickle.loads(pickle.dumps(request))
        service = ours if is_ours(request) else smgs
        async for message in streamed(context, service.generate(request, context)):
            if context.code() is None:
                yield message
        if context.code() is not None:
            check_grpc(context)
            await wire.abort(context.code(), context.details())

    def __getattr__(self, name: str) -> Any:
        async def unserved(request: Any, wire: Any) -> Any:
            return await self._whole(_look_into, request, wire)

        return unserved


async def _generate_once(request: Any, context: Any) -> Any:
    return await grpc_services()[0].generate_once(request, context)


async def _look_into(request: Any, context: Any) -> Any:
    return request.request_ids


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_dflash(OverTheWire(), server)
    add_mlx_engine(OverTheWire(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def called(channel: grpc.aio.Channel, method: str, wire: bytes) -> None:
    if not method.endswith("/Generate"):
        await channel.unary_unary(method)(wire)
        return
    async for _ in channel.unary_stream(method)(wire):
        pass


@pytest.mark.parametrize(
    "method",
    [
        "/dflash.v1.DFlashService/Generate",
        "/dflash.v1.DFlashService/GenerateOnce",
        "/mlx.grpc.engine.MlxEngine/Generate",
        "/mlx.grpc.engine.MlxEngine/Abort",
    ],
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, method: str
) -> None:
    for wire in GARBAGE:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await called(channel, method, wire)
        assert caught.value.code() == StatusCode.INVALID_ARGUMENT, (wire, caught.value.details())
        assert "cannot be read" in (caught.value.details() or "")


async def test_a_message_that_is_one_still_comes_through(channel: grpc.aio.Channel) -> None:
    request = pb.GenerateOnceRequest(spec=pb.GenerationSpec(model="stub-model", text="Once"))
    answer = await channel.unary_unary("/dflash.v1.DFlashService/GenerateOnce")(request.SerializeToString())
    assert pb.GenerateOnceResponse.FromString(answer).tokens.text == "Hello, world"


def test_an_unreadable_message_travels_and_says_so_to_whoever_looks_into_it() -> None:
    arrived = pickle.loads(pickle.dumps(Unreadable("a.Service")))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        _ = arrived.spec
    assert arrived.meant_for == "a.Service"


def test_serve_registers_the_services_that_take_any_bytes() -> None:
    functions = grpc_options(9000)["grpc_servicer_functions"]
    assert "deployments.rpc.servicers.add_dflash" in functions
    assert "deployments.rpc.servicers.add_mlx_engine" in functions


async def test_rays_own_grpc_server_hands_on_what_cannot_be_read() -> None:
    seen: list[Any] = []

    def handler(service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def whole(request: Any, context: Any) -> bytes:
            seen.append((service_method, pickle.loads(pickle.dumps(request))))
            return b""

        return whole

    server = gRPCGenericServer(handler)
    add_dflash(Mock(), server)  # as Serve does
    add_mlx_engine(Mock(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ours, smgs = "/dflash.v1.DFlashService/GetStats", "/mlx.grpc.engine.MlxEngine/Abort"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in (ours, smgs):
            await channel.unary_unary(method)(b"\xff")
        await channel.unary_unary(ours)(b"")
    await server.stop(None)
    assert [method for method, _ in seen] == [ours, smgs, ours]
    assert [type(request) for _, request in seen] == [Unreadable, Unreadable, pb.GetStatsRequest]
    assert [request.meant_for for _, request in seen[:2]] == [OUR_SERVICE, MLX_SERVICE]
    assert [is_ours(request) for _, request in seen[:2]] == [True, False]
