"""The scale simulation on Ray Serve: real routers, proxy and exchange; targets hold many lanes each.

A lane of a stand-in target sleeps three quarters of a round, and asks a stand-in drafter, on a replica of its
own, that sleeps the rest: by value over a Serve handle, as the real ones do. 64 pairs of replicas would not
fit a small machine, so a process holds up to ``LANES_PER_PROCESS`` of them.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray import serve
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

import dflash_core.pair
from deployments import app, proxy
from deployments.cluster import start_node
from deployments.engine import RouterParts
from deployments.exchange.handle import HandleLink
from deployments.exchange.messages import DraftCall, DraftReply
from deployments.generation import ModelCard
from deployments.inbox import Mailbox
from deployments.ingress import Ingress
from deployments.lanes import Standing
from deployments.messages import Answer, Opening
from deployments.pinning import LaneRouter
from deployments.serve_stage import ServeStage
from deployments.settings import Place, Settings
from dflash_core.request import WindowId
from dflash_core.text.tokenizer import Tokenizer
from tests.benchmarks.scale_figures import Figures, cost_of
from tests.benchmarks.scale_http import play_clients
from tests.benchmarks.stand_ins import SimulatedLane

LANES_PER_PROCESS = 16
TOKEN_BYTES = 5120  # projected features of one token


class RouterEngine:
    """What a router reads of the model: the embedded tokenizer."""

    def open_router(self, settings: Settings) -> RouterParts:
        path = Path(dflash_core.pair.__file__).parent / "target"
        return RouterParts(ModelCard(("demo",), 0, 100_000), Tokenizer.load(path))


class SleepingDrafter:
    """Drafts for any number of lanes, each as if it were alone."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    async def draft(self, call: DraftCall) -> DraftReply:
        await asyncio.sleep(self._seconds)
        return DraftReply(call.number, call.fingerprint, np.zeros((len(call.row_ids), 15), np.int32))

    async def close(self, window_id: WindowId) -> None: ...


class DraftedLane(SimulatedLane):
    """Asks its drafter in every round; what that takes beyond the drafter's sleep makes the round longer."""

    def __init__(self, name: str, round_s: float, link: HandleLink):
        super().__init__(name, round_s)
        self._link = link
        self._number = 0
        self.exchange_s: list[float] = []

    def _await_round(self, now: float) -> None:
        self._task = asyncio.ensure_future(self._round())

    async def _round(self) -> None:
        rows = sum(window.num_rows for window, _ in self._windows.values())
        self._number += 1
        row_ids = (None,) * rows
        anchors = np.zeros(rows * TOKEN_BYTES * 2 // 4, np.int32)  # as many bytes as two tokens' features
        call = DraftCall(
            WindowId(self.name), self._number, "f", "bfloat16", TOKEN_BYTES, row_ids, (), anchors, 16
        )
        began = time.monotonic()
        await self._link.draft(call, by_reference=False)
        self.exchange_s.append(time.monotonic() - began - 0.25 * self._round_s)
        due = time.monotonic() + 0.75 * self._round_s
        await asyncio.sleep(0.75 * self._round_s)
        self._end_round(due)


class ManyLanes:
    """A target process that holds many lanes."""

    def __init__(self, num_lanes: int, round_s: float, drafter: Any):
        replica = serve.get_replica_context().replica_id.unique_id
        link = HandleLink(drafter)
        self._lanes = {
            f"{replica}.{i}": DraftedLane(f"{replica}.{i}", round_s, link) for i in range(num_lanes)
        }

    async def play(self, opening: Opening, inbox: Mailbox) -> AsyncGenerator[Answer, None]:
        lane = self._lanes.get(opening.lane) or next(iter(self._lanes.values()))
        mail = asyncio.ensure_future(self._read(opening, lane, inbox))
        try:
            async for answer in lane.play(opening):
                yield answer
        finally:
            mail.cancel()

    async def standing(self, router: str, num_waiting: int) -> list[Standing]:
        return [lane.standing for lane in self._lanes.values()]

    async def stats(self) -> dict[str, Any]:
        return {"lane": "many", "drafter": "ok", "facts": {}}

    async def exchange(self) -> list[float]:
        return [seconds for lane in self._lanes.values() for seconds in lane.exchange_s]

    async def _read(self, opening: Opening, lane: DraftedLane, inbox: Mailbox) -> None:
        async for letters in inbox.take(opening.window_id, len(opening.letters)):
            lane.apply(opening.window_id, letters)


class ManyLanesRouter(LaneRouter):
    """A lane's name begins with its process's."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.metadata.session_id = pending_request.metadata.session_id.partition(".")[0]
        return await super().choose_replicas(candidate_replicas, pending_request)


class ManyLanesStage(ServeStage):
    """Each process speaks for all its lanes."""

    async def standings(self, router: str, num_waiting: int) -> list[Standing]:
        response = self._target.broadcast("standing", router, num_waiting)
        answers = await response.results_async(timeout_s=5.0, return_exceptions=True)
        return [standing for answer in answers if isinstance(answer, list) for standing in answer]


class CountingIngress(Ingress):
    """The router, which tells what it costs."""

    def __init__(self, settings: Settings, engine: Any, target: Any):
        super().__init__(settings, engine, target)
        self._stages._local = ManyLanesStage(target)

    async def cost(self) -> tuple[float, float]:
        """CPU seconds of this process, and rows' rounds so far."""
        values = self._statistics.snapshot().values
        return time.process_time(), values["dflash_row_rounds_total"].get((), 0.0)


def measure_serve(lanes: int, rows: int, routers: int, seconds: float, round_s: float) -> Figures:
    """One line of the table, with a cluster of its own."""
    os.environ.update(PYTHONPATH=str(Path(__file__).parents[2]), RAY_USAGE_STATS_ENABLED="0")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    proxy.install()
    folder = tempfile.mkdtemp(prefix="dfs", dir="/tmp")
    try:
        start_node(
            print,
            attempts=3,
            num_cpus=16,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options={"host": "127.0.0.1", "port": _free_port()})
        return _measure(lanes, rows, routers, seconds, round_s)
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _measure(lanes: int, rows: int, routers: int, seconds: float, round_s: float) -> Figures:
    settings = Settings(max_rows=rows, max_queue=lanes * rows, cache_dir=None)
    options = app._options(settings, Place(num_cpus=0.1), wants_blas=False)
    processes = max(1, lanes // LANES_PER_PROCESS)
    each = lanes // processes
    drafter = serve.deployment(name="Drafter", **{**options, "request_router_config": app._STICKY})(
        SleepingDrafter
    )
    pinned = RequestRouterConfig.model_validate(
        {"request_router_class": ManyLanesRouter, "request_router_kwargs": {"num_fallback_replicas": 0}}
    )
    target = serve.deployment(
        name="Target", **{**options, "num_replicas": processes, "request_router_config": pinned}
    )(ManyLanes)
    router = serve.deployment(name="Router", **{**options, "num_replicas": routers})(
        serve.ingress()(CountingIngress)
    )
    bound = target.bind(each, round_s, drafter.bind(0.25 * round_s))
    serve.run(router.bind(settings, RouterEngine(), bound), name="scale", route_prefix="/")
    handle = serve.get_deployment_handle("Router", "scale")
    client = _get_global_client()
    assert client is not None
    port = client.http_config.port

    costs: list[tuple[float, float]] = []

    def note_now() -> None:
        answers = cast(list[tuple[float, float]], handle.broadcast("cost").results(timeout_s=30))
        costs.append((sum(cpu for cpu, _ in answers), sum(count for _, count in answers)))

    async def note() -> None:
        await asyncio.get_running_loop().run_in_executor(None, note_now)

    heard = asyncio.run(play_clients(port, lanes * rows, seconds, note))
    exchange = sorted(
        s
        for told in cast(
            list[list[float]],
            serve.get_deployment_handle("Target", "scale").broadcast("exchange").results(timeout_s=30),
        )
        for s in told
    )
    middle, last = (1e3 * exchange[int(q * len(exchange))] for q in (0.5, 0.99))
    print(f"      exchange with the drafter beyond its own time: p50 {middle:.2f} ms, p99 {last:.2f} ms")
    return Figures(lanes, rows, routers, heard, seconds, cost_of(costs, heard))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
