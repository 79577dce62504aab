"""Clusters that have each other as lanes: real routers over scripted targets, each behind a real port."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from deployments import stages
from deployments.engine import RouterParts
from deployments.generation import Generation, ModelCard
from deployments.lanes import Standing
from deployments.messages import Opening
from deployments.router import RouterReplica
from deployments.rpc.dflash.v1 import dflash_pb2_grpc
from deployments.settings import Settings
from tests.deployments.other_cluster import Servicer
from tests.deployments.test_desk import TOKENIZER, LocalStage

ROWS = 4


class Targets(LocalStage):
    """A cluster's own targets: one, while they are up."""

    def __init__(self, handle: object):
        super().__init__()
        self.is_up = True

    async def standings(self, router: str, num_waiting: int) -> list[Standing]:
        return [Standing("lane", self.lane.num_rows)] if self.is_up else []


class Handle:
    """The way to no replica: what targets say of themselves is scripted."""

    def options(self, **_: object) -> "Handle":
        return self

    def remote(self) -> None:
        raise ConnectionError("no replica")


class Engine:
    """Opens routers alone."""

    def open_router(self, settings: Settings) -> RouterParts:
        return RouterParts(ModelCard(settings.served_model_names, 0, 4096), TOKENIZER)


class Cluster:
    """One router, its port, and what it was asked."""

    def __init__(self) -> None:
        self.server = grpc.aio.server()
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.asked: list[Generation] = []
        self.router: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return self.router._cluster

    @property
    def targets(self) -> Targets:
        return self.router._stages._local

    @property
    def num_played(self) -> int:
        return sum(isinstance(opening, Opening) for opening in self.targets.openings)

    async def health(self) -> Mapping[str, Any]:
        return await self.router.health()

    async def start(self, lanes: Sequence["Cluster"], *, plays: bool) -> None:
        settings = Settings(
            remote_lanes=tuple(lane.address for lane in lanes), local_lanes=plays or not lanes, max_rows=ROWS
        )
        asked = self.asked

        class Router(RouterReplica):
            def generate(self, generation: Generation) -> Any:
                asked.append(generation)
                return super().generate(generation)

        handle: Any = Handle() if plays else None
        engine: Any = Engine()
        self.router = Router(settings, engine, handle)
        servicer = Servicer(self.router, (), self.router.routes)
        dflash_pb2_grpc.add_DFlashServiceServicer_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self.server)
        await self.server.start()
        await self.router.health()  # and so it watches its lanes

    async def stop(self) -> None:
        await self.server.stop(None)
        self.router._desk.close()
        self.router._stages.close()
        await asyncio.gather(*self.router._stages._watches, return_exceptions=True)


@asynccontextmanager
async def linked(
    monkeypatch: pytest.MonkeyPatch, lanes: Mapping[str, str], *, playing: str
) -> AsyncIterator[Mapping[str, Cluster]]:
    """Clusters by name: ``lanes`` are the names of each one's lanes; those in ``playing`` have targets."""
    monkeypatch.setattr(stages, "ServeStage", Targets)
    clusters = {name: Cluster() for name in lanes}
    try:
        for name, others in lanes.items():
            await clusters[name].start([clusters[other] for other in others], plays=name in playing)
        yield clusters
    finally:
        for cluster in clusters.values():
            await cluster.stop()
