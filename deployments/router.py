"""The router: the queue, and the windows it keeps open on targets. ``ingress`` puts it on the wire."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments import __version__
from deployments.desk import Desk
from deployments.engine import Engine
from deployments.generation import Event, Generation, ModelCard
from deployments.keys import keys_of
from deployments.naming import cluster_id, replica_name
from deployments.observing.exporting import exporting_to
from deployments.observing.watch import Watch
from deployments.openai.limits import Limits
from deployments.remote import remote_lanes
from deployments.remote.route import Route, Via
from deployments.serve_stage import STATS_TIMEOUT_S, awaited
from deployments.settings import Settings
from deployments.siblings import Replicas, Siblings
from deployments.stages import Stages
from deployments.telemetry import Snapshot, Statistics
from deployments.view import Overview, RouterView
from dflash_core.text.stream import TextStream
from dflash_core.text.tokenizer import Tokenizer

logger = logging.getLogger("dflash.router")


class RouterReplica:
    """Implements ``generation.Backend``. Serve builds one per replica."""

    def __init__(self, settings: Settings, engine: Engine, target: DeploymentHandle | None):
        self._settings = settings
        self._target = target
        self._parts = engine.open_router(settings)
        name = _engine_name()
        self._statistics = Statistics(settings.served_model_names[0], name)
        self._exporting = exporting_to(settings.trace_endpoint, name)
        self._watch = Watch(self._exporting.tracer, settings.trace_round_every)
        self._siblings = Siblings(self._own_view, Replicas("view").ask)
        self._knows_probe = False  # the target's findings do not change while it lives
        self._cluster = cluster_id()
        self._has_target = False  # when it was last asked
        self._stages = Stages(name, target, remote_lanes(settings, self._parts, self._cluster))
        self._desk = Desk(
            self._stages,
            self._statistics,
            self._new_text,
            self._parts.tokenizer.eos_token_ids,
            max_rows=settings.max_rows,
            max_windows=settings.windows_per_router,
            max_queue=settings.max_queue,
            window_max_age_s=settings.window_max_age_s,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook for an ingress whose app is built on the replica."""
        from deployments.http import create_app

        # Serve's proxy returns the request id.
        keys = keys_of(self._settings)
        return create_app(
            self, limits=self.limits, api_keys=keys, returns_request_id=False, watch=self._watch
        )

    @property
    def limits(self) -> Limits:
        """What both edges allow."""
        settings = self._settings
        return Limits(max_body_bytes=settings.max_body_bytes, request_timeout_s=settings.request_timeout_s)

    @property
    def model_card(self) -> ModelCard:
        """The model served here."""
        return self._parts.card

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded once; it has no state, so edge and router share it."""
        return self._parts.tokenizer

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Play a request."""
        self._stages.watch(self._desk)
        self._stages.require_way(generation.via, self._cluster)
        async with aclosing(self._watch.played(generation, self._desk.play(generation))) as events:
            async for event in events:
                yield event

    async def health(self) -> Mapping[str, object]:
        """What is served, how busy it is, and on what it runs.

        The status is ``ok`` once a target answers, or a remote lane, ``draining`` from ``drain`` on. Whoever
        asks needs no key, so addresses stay out: the log tells which remote lane is in which state.
        """
        self._stages.watch(self._desk)
        target = await self._target_stats()
        self._has_target = target is not None
        facts = target.pop("facts") if target is not None else {}
        card = self.model_card
        return {
            "status": self._status(target is not None or self._desk.num_lanes > 0 or self._stages.has_remote),
            "model": card.names[0],
            "drafter": card.drafter,
            "drafter_state": target["drafter"] if target is not None else None,
            "windows": self._desk.num_windows,
            "running": self._desk.num_running,
            "waiting": self._desk.num_waiting,
            "room": self._desk.room,
            "lanes": self._desk.num_lanes,
            "cluster": self._cluster,
            "remote_lanes": Counter(self._stages.remote_states.values()),
            "remote_circles": sorted(set(self._stages.circles.values())),
            "width": facts.get("width"),
            "exactness": facts.get("exactness"),
            "device": facts.get("device"),
            "processor": facts.get("processor"),
            "versions": {"dflash-serve": __version__, "mlx": facts.get("mlx"), "ray": ray.__version__},
            "target": target,
            "exchange": asdict(self._desk.traffic),
        }

    def routes(self, via: Via) -> tuple[str, Sequence[Route]]:
        """This cluster's id, and where rows that have passed these clusters may be played."""
        plays = self._has_target or self._desk.has_own_lanes
        own = Route((self._cluster,), self._desk.own_room) if plays else None
        return self._cluster, self._stages.routes(own, self._cluster, via)

    async def drain(self) -> int:
        """Refuse new requests with 503 from now on; the number of those that are not over."""
        return self._desk.drain()

    async def snapshot(self) -> Sequence[Snapshot]:
        """Statistics of this router's requests and windows, with what its target was found to be."""
        if not self._knows_probe and self._target is not None:
            await self._target_stats()
        return [self._statistics.snapshot()]

    async def view(self) -> RouterView:
        """What this router shows of itself; its siblings ask for it."""
        [snapshot] = await self.snapshot()
        return RouterView.now(snapshot, self._desk.view())

    async def overview(self) -> Overview:
        """What all routers show."""
        return await self._siblings.overview()

    def __del__(self) -> None:
        """Serve has drained the replica: close what is open."""
        if hasattr(self, "_desk"):
            self._desk.close()
            self._stages.close()
            self._exporting.stop()

    def _new_text(self, generation: Generation) -> TextStream:
        least = max(0, generation.sampling.min_tokens - generation.num_continued)
        traces = generation.delivery.rounds
        return TextStream(self._parts.tokenizer, generation.stop_strings, min_tokens=least, traces=traces)

    async def _own_view(self, num_missing: int) -> RouterView:
        self._statistics.observe_missing(num_missing)
        return await self.view()

    def _status(self, has_target: bool) -> str:
        if self._desk.is_draining:
            return "draining"
        return "ok" if has_target else "loading"

    async def _target_stats(self) -> dict[str, Any] | None:
        if self._target is None:
            return None
        call = self._target.options(method_name="stats", _by_reference=True)
        try:
            stats: dict[str, Any] = await asyncio.wait_for(awaited(call.remote()), STATS_TIMEOUT_S)
        except Exception as error:
            logger.debug("no target answers: %s", error)
            return None
        self._statistics.observe_probe(stats["facts"].get("exactness", {}).get("shapes", {}))
        self._knows_probe = True
        return stats


def _engine_name() -> str:
    """The label ``engine`` of this router's series.

    Each router counts for itself, and a scrape meets one of them: under one name their counters would jump.
    """
    return replica_name(outside="0")  # there is one router then
