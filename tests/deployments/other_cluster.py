"""Another cluster behind a real gRPC port: our own service over a desk whose windows are played by script."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.app import APP_NAME
from deployments.desk import Desk
from deployments.generation import Backend, Event, Generation, ModelCard
from deployments.keys import KeyRing
from deployments.openai.limits import Limits
from deployments.rpc.access import Access
from deployments.rpc.boundary import answered, streamed
from deployments.rpc.dflash.v1 import dflash_pb2_grpc
from deployments.rpc.entrance import Entrance
from deployments.rpc.health import Health
from deployments.rpc.service import DFlashService, Routes
from deployments.rpc.status import ClosingStatus
from deployments.telemetry import Snapshot, Statistics
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.test_desk import TOKENIZER, LocalStage, desk


class OtherBackend:
    """``generation.Backend`` over a desk."""

    def __init__(self, names: tuple[str, ...], stage: LocalStage, **options: float):
        self.model_card = ModelCard(names, 0, 4096)
        self.tokenizer: Tokenizer = TOKENIZER
        self.statistics = Statistics(names[0], "0")
        self.status = "ok"
        self.stage = stage
        self.desk: Desk = desk(stage, self.statistics, **options)
        self.asked: list[Generation] = []

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        self.asked.append(generation)
        async with aclosing(self.desk.play(generation)) as events:
            async for event in events:
                yield event

    async def health(self) -> Mapping[str, object]:
        return {"status": self.status, "windows": self.desk.num_windows, "room": self.desk.room}

    async def snapshot(self) -> Sequence[Snapshot]:
        return [self.statistics.snapshot()]


class Servicer(dflash_pb2_grpc.DFlashServiceServicer, health_pb2_grpc.HealthServicer):
    """What Ray's proxy does: a failure on the context becomes the call's status."""

    def __init__(self, backend: Backend, keys: tuple[str, ...] = (), routes: Routes = lambda via: ("", ())):
        entrance = Entrance(backend, Limits(), Access(KeyRing(keys)))
        self._service = DFlashService(backend, entrance, routes)
        self.is_older = False  # it passes over structures, and does not tell what it knows
        self._health = Health(backend, (), period_s=1.0, watch_s=1.0)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self.is_older:
            request.spec.ClearField("structure")
        own = _Context(context)
        async with aclosing(streamed(own, self._service.generate(request, own))) as messages:
            async for message in messages:
                yield await _sent(message, own, context)

    async def GenerateOnce(self, request: Any, context: Any) -> Any:  # noqa: N802
        own = _Context(context)
        answer = await answered(own, self._service.generate_once(request, own))
        return await _sent(answer, own, context)

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        own = _Context(context)
        answer = await answered(own, self._service.list_models(own))
        if self.is_older:
            for model in answer.models:  # type: ignore[union-attr]
                model.ClearField("obeyed_fields")
        return await _sent(answer, own, context)

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        own = _Context(context)
        answer = await answered(own, self._service.get_stats(own))
        return await _sent(answer, own, context)

    async def Check(self, request: Any, context: Any) -> HealthCheckResponse:  # noqa: N802
        return await self._health.check(request)


class _Context(RayServegRPCContext):
    """Ray's own, made of what ``grpc.aio`` has."""

    def __init__(self, context: Any):
        self._given = context
        self._failure: tuple[Any, str, Any] = (None, "", ())

    def peer(self) -> str:
        return self._given.peer()

    def invocation_metadata(self) -> Any:
        return list(self._given.invocation_metadata() or ())

    def trailing_metadata(self) -> Any:
        return [("request_id", "r1")]

    def set_code(self, code: Any) -> None:
        self._failure = (code, self._failure[1], self._failure[2])

    def set_details(self, details: str) -> None:
        self._failure = (self._failure[0], details, self._failure[2])

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._failure = (*self._failure[:2], trailing_metadata)

    @property
    def failure(self) -> tuple[Any, str, Any]:
        return self._failure


async def _sent(message: Any, own: _Context, context: Any) -> Any:
    if isinstance(message, ClosingStatus):
        code, details, metadata = own.failure
        await context.abort(code, details, tuple(metadata))
    return message


class OneOfTwo(grpc.aio.ServerInterceptor):
    """Ray's proxy while its Serve has two applications: a call that does not name ours goes nowhere."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if ("application", APP_NAME) in handler_call_details.invocation_metadata:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_not_found)
        return grpc.unary_unary_rpc_method_handler(_not_found)


async def _not_found(request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, "Application metadata not set.")


class OtherCluster:
    """A server that can be killed."""

    def __init__(
        self,
        backend: OtherBackend,
        keys: tuple[str, ...] = (),
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ):
        self.backend = backend
        self.server = grpc.aio.server(interceptors=interceptors)
        servicer = self.servicer = Servicer(backend, keys)
        dflash_pb2_grpc.add_DFlashServiceServicer_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self.server)
        self.port = (
            self.server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else self.server.add_secure_port("127.0.0.1:0", credentials)
        )

    async def kill(self) -> None:
        """Everything that it played is gone, without a word of ours."""
        await self.server.stop(None)
        self.backend.desk.close()


@asynccontextmanager
async def other_cluster(
    *,
    names: tuple[str, ...] = ("demo",),
    keys: tuple[str, ...] = (),
    credentials: grpc.ServerCredentials | None = None,
    is_older: bool = False,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    **options: float,
) -> AsyncIterator[OtherCluster]:
    cluster = OtherCluster(OtherBackend(names, LocalStage(), **options), keys, credentials, interceptors)
    cluster.servicer.is_older = is_older
    await cluster.server.start()
    try:
        yield cluster
    finally:
        await cluster.kill()
        await asyncio.sleep(0)
