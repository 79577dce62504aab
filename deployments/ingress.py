"""The router on the wire: HTTP by its ASGI application, gRPC by the methods below.

Serve's gRPC proxy calls the method that is named as the RPC, whatever its service. Names are therefore used
once over all services, but for ``Generate``.
"""

from collections.abc import AsyncGenerator
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deployments.engine import Engine
from deployments.keys import KeyRing, read_keys
from deployments.router import RouterReplica
from deployments.rpc import options
from deployments.rpc.access import Access
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.health import Health
from deployments.rpc.service import DFlashService
from deployments.settings import Settings

HEALTH_PERIOD_S = 1.0


class Ingress(RouterReplica):
    """Names each RPC as Serve looks for it, and passes it on."""

    def __init__(self, settings: Settings, engine: Engine, target: DeploymentHandle):
        super().__init__(settings, engine, target)
        access = Access(KeyRing(read_keys(settings.api_keys_file)))
        self._service = DFlashService(self, self.limits, access)
        self._health = Health(
            self, options.services(), period_s=HEALTH_PERIOD_S, watch_s=settings.window_max_age_s
        )

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Any, None]:
        """``dflash.v1.DFlashService/Generate``."""
        async for message in self._service.generate(request, grpc_context):
            yield message

    async def GenerateOnce(  # noqa: N802
        self, request: pb.GenerateOnceRequest, grpc_context: RayServegRPCContext
    ) -> pb.GenerateOnceResponse:
        """``dflash.v1.DFlashService/GenerateOnce``."""
        return await self._service.generate_once(request, grpc_context)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        """``dflash.v1.DFlashService/ListModels``."""
        return await self._service.list_models(grpc_context)

    async def GetStats(  # noqa: N802
        self, request: pb.GetStatsRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetStatsResponse:
        """``dflash.v1.DFlashService/GetStats``."""
        return await self._service.get_stats(grpc_context)

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """``grpc.health.v1.Health/Check``."""
        return await self._health.check(request, grpc_context)

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Any, None]:
        """``grpc.health.v1.Health/Watch``."""
        async for message in self._health.watch(request, grpc_context):
            yield message


RouterIngress = serve.ingress()(Ingress)
