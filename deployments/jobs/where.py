"""Where the application is that a batch talks to: one that runs on the cluster, or one of its own."""

import hashlib
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deployments.cluster import joined_cluster
from deployments.listening import NEAREST, host_port
from deployments.settings import Settings
from deployments.up import serving, stop_signals
from dflash_core.errors import Unavailable

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Application:
    """An application that takes requests while the block that gave it lasts."""

    url: str  # without /v1
    stop: threading.Event  # set by the first SIGINT or SIGTERM


@contextmanager
def at(url: str) -> Iterator[Application]:
    """One whose address is known."""
    with stop_signals() as stop:
        yield Application(url, stop)


@contextmanager
def on_cluster(name: str, cluster: str) -> Iterator[Application]:
    """One that runs on this Ray cluster. Raises Unavailable if it does not, or is out of reach from here."""
    with joined_cluster(cluster, _say):
        url = _find(name)
    with at(url) as application:  # Ray is not needed from here on, and can be restarted under us
        yield application


@contextmanager
def of_our_own(settings: Settings, output: str) -> Iterator[Application]:
    """One for this batch alone, beside others if ``settings`` name a cluster, else on a Ray of its own.

    It is named after the output: submitted again, the batch replaces what a killed run left behind.
    """
    name = f"dflash-batch-{hashlib.blake2b(output.encode(), digest_size=4).hexdigest()}"
    if settings.address is None:
        settings = settings.model_copy(update={"http_port": _free_port(), "grpc_port": _free_port()})
    with serving(settings, guest=name) as stop:
        yield Application(_find(name), stop)


def cluster_of(environment: Mapping[str, str]) -> str | None:
    """The cluster that this process belongs to: Ray sets the variable in jobs."""
    return environment.get("RAY_ADDRESS") or None


def _say(message: str) -> None:
    print(f"batch: {message}", file=sys.stderr, flush=True)


def _find(name: str) -> str:
    import ray
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        raise Unavailable("Serve does not run on this cluster: start the application, or say --standalone")
    return url_of(name, client.get_serve_details(), ray.get_runtime_context().get_node_id())


def url_of(name: str, details: Mapping[str, Any], node_id: str) -> str:
    """The application's URL as this node reaches it, by its own proxy if it has one.

    ``details`` is Serve's account of itself. Raises Unavailable if there is no way.
    """
    applications = details["applications"]
    if name not in applications:
        found = ", ".join(sorted(applications)) or "none"
        raise Unavailable(
            f'no application "{name}" on this cluster (found: {found}): start it, name it by --app, '
            "or say --standalone"
        )
    listening = details["http_options"]
    host, port = str(listening["host"]), int(listening["port"])
    healthy = {node: p["node_ip"] for node, p in details["proxies"].items() if p["status"] == "HEALTHY"}
    if node_id in healthy:
        host = NEAREST.get(host, host)
    elif healthy and host not in _LOOPBACK:
        host = next(iter(healthy.values()))
    else:
        raise Unavailable(
            f"Serve listens on {host} of {len(healthy)} other nodes, which this one cannot reach: serve with "
            "--host 0.0.0.0, run the job where the proxy is, or give --url"
        )
    return f"http://{host_port(host, port)}{applications[name]['route_prefix'] or ''}".rstrip("/")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
