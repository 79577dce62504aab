"""The router on the wire: HTTP by its ASGI application, gRPC by the methods below.

Serve's gRPC proxy calls the method that is named as the RPC, whatever its service. Names are therefore used
once over all services, but for ``Generate``.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthListRequest,
)
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deployments.engine import Engine
from deployments.generation import Backend
from deployments.keys import KeyRing, keys_of
from deployments.observing.lines import write_logs
from deployments.router import RouterReplica
from deployments.rpc import options
from deployments.rpc.access import Access
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.entrance import Entrance
from deployments.rpc.health import Health
from deployments.rpc.service import DFlashService
from deployments.rpc.servicers import is_ours
from deployments.rpc.watched import Calls
from deployments.settings import Settings
from dflash_core.checkpoints import resolve_target

if TYPE_CHECKING:
    from deployments.rpc.mlx_engine import MlxEngine

HEALTH_PERIOD_S = 1.0
_OURS, _FOREIGN, _HEALTH = "dflash.v1.DFlashService", "mlx.grpc.engine.MlxEngine", "grpc.health.v1.Health"


class Ingress(RouterReplica):
    """Names each RPC as Serve looks for it, and passes it on."""

    def __init__(self, settings: Settings, engine: Engine, target: DeploymentHandle | None):
        write_logs(settings.log_format, settings.log_dir, "router")
        super().__init__(settings, engine, target)
        self._calls = Calls(self._watch)
        access = Access(KeyRing(keys_of(settings)))
        entrance = Entrance(self, self.limits, access)
        self._service = DFlashService(self, entrance, self.routes)
        self._mlx = _mlx_engine(self, entrance, settings) if options.serves_mlx_engine() else None
        self._health = Health(
            self, options.services(), period_s=HEALTH_PERIOD_S, watch_s=settings.window_max_age_s
        )

    async def Generate(  # noqa: N802
        self, request: Any, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Any, None]:
        """``dflash.v1.DFlashService/Generate`` or ``mlx.grpc.engine.MlxEngine/Generate``, by the request."""
        if self._mlx is None or is_ours(request):
            service, messages = _OURS, self._service.generate(request, grpc_context)
        else:
            service, messages = _FOREIGN, self._mlx.generate(request, grpc_context)
        async with aclosing(self._calls.streamed(f"{service}/Generate", grpc_context, messages)) as answers:
            async for message in answers:
                yield message

    async def GenerateOnce(  # noqa: N802
        self, request: pb.GenerateOnceRequest, grpc_context: RayServegRPCContext
    ) -> Any:
        """``dflash.v1.DFlashService/GenerateOnce``."""
        return await self._calls.answered(
            f"{_OURS}/GenerateOnce", grpc_context, self._service.generate_once(request, grpc_context)
        )

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> Any:
        """``dflash.v1.DFlashService/ListModels``."""
        return await self._calls.answered(
            f"{_OURS}/ListModels", grpc_context, self._service.list_models(grpc_context)
        )

    async def GetStats(  # noqa: N802
        self, request: pb.GetStatsRequest, grpc_context: RayServegRPCContext
    ) -> Any:
        """``dflash.v1.DFlashService/GetStats``."""
        return await self._calls.answered(
            f"{_OURS}/GetStats", grpc_context, self._service.get_stats(grpc_context)
        )

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> Any:
        """``grpc.health.v1.Health/Check``."""
        return await self._calls.answered(f"{_HEALTH}/Check", grpc_context, self._health.check(request))

    async def List(  # noqa: N802
        self, request: HealthListRequest, grpc_context: RayServegRPCContext
    ) -> Any:
        """``grpc.health.v1.Health/List``."""
        return await self._calls.answered(f"{_HEALTH}/List", grpc_context, self._health.list())

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Any, None]:
        """``grpc.health.v1.Health/Watch``."""
        async for message in self._calls.streamed(
            f"{_HEALTH}/Watch", grpc_context, self._health.watch(request)
        ):
            yield message

    @property
    def _foreign(self) -> "MlxEngine":
        """The foreign contract; its methods are called only where it is registered, and so is there."""
        return cast("MlxEngine", self._mlx)

    async def Abort(self, request: Any, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        """``mlx.grpc.engine.MlxEngine/Abort``."""
        return await self._calls.answered(
            f"{_FOREIGN}/Abort", grpc_context, self._foreign.abort(request, grpc_context)
        )

    async def HealthCheck(self, request: Any, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        """``mlx.grpc.engine.MlxEngine/HealthCheck``."""
        return await self._calls.answered(
            f"{_FOREIGN}/HealthCheck", grpc_context, self._foreign.health_check()
        )

    async def GetModelInfo(self, request: Any, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        """``mlx.grpc.engine.MlxEngine/GetModelInfo``."""
        return await self._calls.answered(
            f"{_FOREIGN}/GetModelInfo", grpc_context, self._foreign.model_info(grpc_context)
        )

    async def GetServerInfo(self, request: Any, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        """``mlx.grpc.engine.MlxEngine/GetServerInfo``."""
        return await self._calls.answered(
            f"{_FOREIGN}/GetServerInfo", grpc_context, self._foreign.server_info(grpc_context)
        )

    async def GetTokenizer(  # noqa: N802
        self, request: Any, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Any, None]:
        """``mlx.grpc.engine.MlxEngine/GetTokenizer``."""
        async for message in self._calls.streamed(
            f"{_FOREIGN}/GetTokenizer", grpc_context, self._foreign.tokenizer(grpc_context)
        ):
            yield message


def _mlx_engine(backend: Backend, entrance: Entrance, settings: Settings) -> "MlxEngine":
    from deployments.rpc.mlx_engine import MlxEngine

    return MlxEngine(backend, entrance, lambda: resolve_target(settings.target))


RouterIngress = serve.ingress()(Ingress)
