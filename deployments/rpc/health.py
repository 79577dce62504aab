"""``grpc.health.v1.Health`` over a ``Backend``: whether it takes requests. Needs no key."""

import asyncio
from collections.abc import AsyncGenerator, Collection

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse

from deployments.generation import Backend
from deployments.openai.errors import RouteNotFound
from dflash_core.errors import Unavailable

SERVER = ""  # the name of the server as a whole

Status = HealthCheckResponse.ServingStatus


class Health:
    """Answers for the server and for each of its services, which share one state."""

    def __init__(self, backend: Backend, services: Collection[str], *, period_s: float, watch_s: float):
        self._backend = backend
        self._services = {SERVER, *services}
        self._period_s = period_s
        self._watch_s = watch_s

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """Tell the state once; raises ``RouteNotFound`` for a service that is not served."""
        if request.service not in self._services:
            raise RouteNotFound("No such service here.")
        status, _ = await self._status()
        return HealthCheckResponse(status=status)

    async def list(self) -> HealthListResponse:
        """Tell the state of all services."""
        status, _ = await self._status()
        return HealthListResponse(
            statuses={service: HealthCheckResponse(status=status) for service in self._services}
        )

    async def watch(self, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse, None]:
        """Tell the state now and whenever it changes.

        A stream that never ended would hold up a replica that drains. So it ends with ``Unavailable``, on
        which clients of this protocol call again: when the server drains, and after ``watch_s`` in any case.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._watch_s
        said = None
        while clock() < until:
            status, is_draining = HealthCheckResponse.SERVICE_UNKNOWN, False
            if request.service in self._services:
                status, is_draining = await self._status()
            if status != said:
                said = status
                yield HealthCheckResponse(status=status)
            if is_draining:
                break
            await asyncio.sleep(self._period_s)
        raise Unavailable(f"the server drains, or {self._watch_s:g} seconds are over; call again")

    async def _status(self) -> tuple[Status, bool]:
        """The state, and whether the server drains."""
        status = (await self._backend.health()).get("status")
        state = HealthCheckResponse.SERVING if status == "ok" else HealthCheckResponse.NOT_SERVING
        return state, status == "draining"
