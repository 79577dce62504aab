"""All checks in order. What a check rests on comes before it: an environment with two MLX is not imported."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.doctor import cluster, device, models, node_memory, ports, remote, software, token, trial
from deployments.doctor.finding import Finding, error, ok
from deployments.memory import Pair, read_pair, with_prefixes
from deployments.memory_limit import find_limit
from deployments.pairing import resolve_pair
from deployments.settings import Settings
from dflash_core import blas
from dflash_core.errors import DFlashError, Unavailable


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """How much to look at."""

    has_trial: bool = True  # load the pair and play; takes a minute the first time
    trial_s: float = trial.SPEED_S


def examine(
    settings: Settings, options: DoctorOptions, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Yield findings as they come; ``Report.of`` collects them."""
    yield software.check_versions()
    backend = software.check_backends()
    yield backend
    logging.getLogger("dflash_core.blas").setLevel(logging.ERROR)  # its warnings are our findings
    report = blas.prepare()
    yield software.check_blas(report)
    yield software.check_compiler(report)
    home = Path.home() if environment.get("HOME") else None
    yield token.check_token(environment, home)
    found = ports.listeners()
    yield ports.check_listeners(found)
    yield from ports.check_wanted(settings, found)
    can_load = False
    if settings.local_lanes:
        findings = list(models.check_files(settings))
        yield from findings
        if backend.level == "ok" and all(finding.level != "error" for finding in findings):
            found_device = device.check_device()
            yield found_device
            can_load = found_device.level == "ok"
    if can_load:
        yield from _computing(settings, options)
    if settings.remote_lanes:
        yield from remote.check_lanes(settings)
    if settings.address is not None:
        yield from _cluster(settings, settings.address, has_pair=can_load)


def _computing(settings: Settings, options: DoctorOptions) -> Iterator[Finding]:
    """What needs MLX. Where a cluster is named, its nodes' memory is looked at instead of this one's."""
    from deployments.machine import backend

    if backend() == "cpu":
        yield trial.check_product(trial.product_ms())
    target, drafter = resolve_pair(settings.target, settings.drafter)
    limit = find_limit()
    memory = models.check_memory(with_prefixes(_pair(settings), settings.wanted_prefix_bytes, limit), limit)
    if settings.address is None:
        yield memory
    if options.has_trial:
        if memory.level == "error":
            yield ok("trial", "not played: this machine does not hold the pair")
        else:
            yield from _trial(target, drafter, options.trial_s)


def _pair(settings: Settings) -> Pair:
    target, drafter = resolve_pair(settings.target, settings.drafter)
    return read_pair(target, drafter, rows=settings.max_rows, max_context=settings.max_context)


def _trial(target: Path, drafter: Path | None, seconds: float) -> Iterator[Finding]:
    try:
        played, fingerprint = trial.run_trial(target, drafter, seconds)
    except DFlashError as failure:  # such as a tensor with a NaN in it
        yield error("trial", str(failure), "fetch the files again")
        return
    yield from trial.check_trial(played, fingerprint)


def _cluster(settings: Settings, address: str, *, has_pair: bool) -> Iterator[Finding]:
    from deployments.cluster import joined_cluster

    try:
        with joined_cluster(address, logging.getLogger(__name__).info):
            import ray

            yield from cluster.check_agreement(cluster.ask_nodes(cluster.describe_node))
            yield from cluster.check_placement(settings, ray.cluster_resources())
            if has_pair:
                nodes = cluster.name_nodes(ray.nodes())
                answers = cluster.ask_nodes(node_memory.describe_memory)
                yield from node_memory.check_nodes(settings, _pair(settings), nodes, answers)
    except Unavailable as failure:
        remedy = "start the cluster (ray start --head), or give its address and token"
        yield error("cluster", str(failure), remedy)
