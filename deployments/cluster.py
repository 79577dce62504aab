"""Ray for ``dflash-serve up``: join the cluster that the settings name, or run one of our own."""

import contextlib
import io
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments import proxy
from deployments.settings import Settings
from dflash_core.errors import Unavailable

MOST_OBJECT_STORE_BYTES = 2 * 2**30


@contextmanager
def own_cluster(settings: Settings, say: Callable[[str], None]) -> Iterator[None]:
    """Run a node on this machine; everything of it is gone afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    proxy.install()
    _prepare_token()
    import ray

    say("starting Ray")
    folder = tempfile.mkdtemp(prefix="dflash-", dir="/tmp")  # a short path: sockets live in it
    try:
        start_node(
            say,
            num_cpus=_logical_cpus(settings),
            object_store_memory=_object_store_bytes(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        yield
    finally:
        with hushed():
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_cluster(
    address: str, say: Callable[[str], None], *, shows_workers: bool = False
) -> Iterator[None]:
    """Connect to a cluster that runs already, and leave it again. ``shows_workers``: what they print."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    say(f"joining Ray at {address}")
    try:
        ray.init(address=address, log_to_driver=shows_workers, logging_level=logging.WARNING)
    except Exception as error:
        raise Unavailable(f"Ray at {address} cannot be joined: {_first_line(error)}") from error
    try:
        yield
    finally:
        with hushed():
            ray.shutdown()


def start_node(say: Callable[[str], None], *, attempts: int = 2, **options: Any) -> None:
    """``ray.init`` of a node of our own, tried again if it is late: Ray's limit is short on a busy machine.

    Ray would run its workers at niceness 15, behind whatever else the machine does; ours serve people.
    Raises Unavailable with one line.
    """
    import ray

    # "local": with RAY_ADDRESS set Ray would join that cluster instead.
    options |= {"address": "local", "_system_config": {"worker_niceness": 0}}
    for attempt in range(1, attempts + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:
            _end_processes(error)
            if not _is_late(error):
                raise Unavailable(f"Ray did not start: {_first_line(error)}") from error
            if attempt == attempts:
                advice = "Is this machine very busy, or short of memory?"
                raise Unavailable(f"Ray did not start: {_first_line(error)} {advice}") from error
            say("Ray's node was not up in time; trying once more")


@contextmanager
def hushed() -> Iterator[None]:
    """Leave out what Ray prints about actors that end because we end them. Log records still come."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _is_late(error: Exception) -> bool:
    # Ray raises a bare Exception here; its words are all there is.
    return isinstance(error, TimeoutError) or "timed out" in str(error).lower()


def _end_processes(error: Exception) -> None:
    """End what a node started before it failed. Ray keeps no other reference to it than the traceback."""
    from ray._private.node import Node

    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("self")
        if isinstance(node, Node):
            with contextlib.suppress(Exception):
                node.kill_all_processes(check_alive=False, allow_graceful=False)
            return
        trace = trace.tb_next


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _prepare_token() -> None:
    """Ray's token authentication is on; where its token file cannot be kept, a token for this run alone."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    folder = Path.home() / ".ray"
    try:
        folder.mkdir(exist_ok=True)
        is_kept = (folder / "auth_token").is_file() or os.access(folder, os.W_OK)
    except OSError:
        is_kept = False
    if not is_kept and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _logical_cpus(settings: Settings) -> int:
    """What Ray hands out: the real cores, or as many as the placement asks for."""
    places = [settings.placement.router, settings.placement.target]
    if settings.drafter is not None:
        places.append(settings.placement.drafter)
    asked = sum((place.max_replicas or place.replicas) * place.num_cpus for place in places)
    return max(os.cpu_count() or 1, math.ceil(asked))


def _object_store_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MOST_OBJECT_STORE_BYTES, memory // 5)
