"""Router, target and drafter, bound together. Import path for Serve: ``deployments.app:build``.

``serve run deployments.app:build target=... max_rows=8``, ``serve deploy`` with ``args:`` and
``dflash-serve up`` all end in ``build``.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.schema import LoggingConfig

from deployments.drafter import DrafterReplica
from deployments.engine import Engine, LocalEngine
from deployments.ingress import RouterIngress
from deployments.pinning import LaneRouter
from deployments.proxy import GRPC_LIMIT_BYTES
from deployments.scaling import FULLNESS
from deployments.settings import Place, Placement, Settings, load_settings
from deployments.target import TargetReplica

APP_NAME = "dflash"

# Load of one replica from which on Serve starts another.
DRAFTER_LOAD = 0.6  # calls at a time, on average: it serves one after another, so 1 is all that it can do
ROUTER_LOAD = 128.0  # requests at a time

# Serve's own limits are the outer belt: the router's queue is the one that says no.
_MANY = 10_000
_PINNED = RequestRouterConfig.model_validate(
    {"request_router_class": LaneRouter, "request_router_kwargs": {"num_fallback_replicas": 0}}
)
_STICKY = RequestRouterConfig.model_validate(
    {"request_router_class": ConsistentHashRouter, "request_router_kwargs": {"num_fallback_replicas": 0}}
)


def build(args: "Mapping[str, Any] | Settings") -> Application:
    """Build the application from settings, or from the arguments that ``serve run`` was given.

    ``config=FILE`` names a YAML file of settings; other arguments win over it.
    """
    if isinstance(args, Settings):
        return assemble(args, LocalEngine())
    flags = dict(args)
    file = flags.pop("config", None)
    return assemble(load_settings(Path(file) if file else None, flags), LocalEngine())


def assemble(settings: Settings, engine: Engine) -> Application:
    """Bind the deployments over an engine."""
    places = settings.placement
    # Replicas have no use for the placement; without it, a change of replica counts restarts nobody, but on
    # Linux unless ``blas_threads`` is given: lanes share the cores out.
    bare = settings.model_copy(update={"placement": Placement(), "max_windows": _max_windows(settings)})
    target = _bind_target(settings, (bare, engine)) if settings.local_lanes else None
    options = _scaled(_options(settings, places.router, wants_blas=False), places.router, ROUTER_LOAD)
    return serve.deployment(name="Router", **options)(RouterIngress).bind(bare, engine, target)


def _bind_target(settings: Settings, arguments: tuple[Settings, Engine]) -> Application:
    """Targets, and drafters if there are to be any."""
    places = settings.placement
    drafter = None
    if settings.drafter is not None:
        options = _scaled(_options(settings, places.drafter, wants_blas=True), places.drafter, DRAFTER_LOAD)
        options["request_router_config"] = _STICKY
        drafter = serve.deployment(name="Drafter", **options)(DrafterReplica).bind(*arguments)
    options = _options(settings, places.target, wants_blas=True)
    rows = max(1.0, FULLNESS * settings.max_rows)
    options = _scaled(options, places.target, rows, "deployments.scaling:by_rows")
    options["request_router_config"] = _PINNED
    return serve.deployment(name="Target", **options)(TargetReplica).bind(*arguments, drafter)


def _max_windows(settings: Settings) -> int:
    """Windows of one target: a place for those that each router fills, or the queue of one would wait.

    A router shares the rows of one window between two where that is faster.
    """
    router, each = settings.placement.router, max(2, settings.windows_per_router)
    return max(settings.max_windows, each * (router.max_replicas or router.replicas))


def _options(settings: Settings, place: Place, *, wants_blas: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": place.num_cpus,
            "resources": place.resources,
            "runtime_env": {"env_vars": _environment(settings, wants_blas)},
        },
        "max_ongoing_requests": _MANY,
        "max_queued_requests": -1,
        "graceful_shutdown_timeout_s": settings.grace_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        # One line for every round would cost more than the call; the router writes its own for each request.
        "logging_config": LoggingConfig(
            enable_access_log=False, encoding="JSON" if settings.log_format == "json" else "TEXT"
        ),
    }
    options["num_replicas"] = place.replicas
    return options


def _scaled(options: dict[str, Any], place: Place, each: float, policy: str | None = None) -> dict[str, Any]:
    """The same deployment with as many replicas as its load needs, if its place says so.

    ``each`` is the load of one replica: in ongoing requests, or in what ``policy`` counts.
    """
    if place.max_replicas is None:
        return options
    scaling: dict[str, Any] = {
        "min_replicas": place.replicas,
        "max_replicas": place.max_replicas,
        "target_ongoing_requests": each,
        "look_back_period_s": 10.0,  # upscaling waits as long at least
        "upscale_delay_s": 5.0,
        "downscale_delay_s": place.downscale_delay_s,
    }
    if policy is not None:
        scaling["policy"] = {"policy_function": policy}
    return {name: value for name, value in options.items() if name != "num_replicas"} | {
        "autoscaling_config": scaling
    }


def _environment(settings: Settings, wants_blas: bool) -> dict[str, str]:
    """Latency levers of one deployment's processes; Ray reads them when the process starts.

    Set here and nowhere else: cluster-wide, the second one would keep drivers from calling handles.
    """
    variables = {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(GRPC_LIMIT_BYTES),
    }
    if sys.platform == "linux":  # or malloc returns every large message's memory, and faults it in again
        variables["MALLOC_MMAP_THRESHOLD_"] = str(64 * 2**20)
        variables["MALLOC_TRIM_THRESHOLD_"] = str(256 * 2**20)
    if wants_blas and sys.platform == "linux":  # Metal needs none, and other threads are other processes
        variables["OPENBLAS_NUM_THREADS"] = str(blas_threads(settings))
        variables["OMP_NUM_THREADS"] = variables["OPENBLAS_NUM_THREADS"]
    return variables


def blas_threads(settings: Settings) -> int:
    """Threads per MLX replica.

    A lane's target and drafter take turns, so both get all of the lane's cores; lanes share them out.
    """
    if settings.blas_threads is not None:
        return settings.blas_threads
    return max(1, (os.cpu_count() or 1) // settings.placement.target.replicas)
