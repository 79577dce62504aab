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
from deployments.settings import Place, Placement, Settings, load_settings
from deployments.target import TargetReplica

APP_NAME = "dflash"
GRPC_LIMIT_BYTES = 2**30  # of one by-value message between replicas; Ray's default is 4 MB

# Serve's own limits are the outer belt: the router's queue is the one that says no.
_MANY = 10_000
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
    # Replicas have no use for the placement; without it, a change of replica counts restarts nobody.
    arguments = (settings.model_copy(update={"placement": Placement()}), engine)
    drafter = None
    if settings.drafter is not None:
        options = _options(settings, places.drafter, wants_blas=True)
        options["request_router_config"] = _STICKY
        drafter = serve.deployment(name="Drafter", **options)(DrafterReplica).bind(*arguments)
    options = _options(settings, places.target, wants_blas=True)
    target = serve.deployment(name="Target", **options)(TargetReplica).bind(*arguments, drafter)
    options = _options(settings, places.router, wants_blas=False)
    return serve.deployment(name="Router", **options)(RouterIngress).bind(*arguments, target)


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
    if place.max_replicas is None:
        options["num_replicas"] = place.replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": place.replicas,
            "max_replicas": place.max_replicas,
            "target_ongoing_requests": 1,
            "metrics_interval_s": 1.0,
        }
    return options


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
    if wants_blas:
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
