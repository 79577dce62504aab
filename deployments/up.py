"""``dflash-serve up``: start Ray and Serve, or join them, serve until told to stop, leave nothing behind."""

import json
import os
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from deployments.cluster import hushed, joined_cluster, own_cluster
from deployments.endpoints import endpoints
from deployments.engine import LocalEngine
from deployments.listening import NEAREST, bind_fault, everywhere, host_port
from deployments.observing.following import shown as shown_logs
from deployments.settings import Settings
from dflash_core.errors import CheckpointError, DFlashError, Unavailable

PROGRESS_PERIOD_S = 0.5


def up(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises DFlashError where it cannot; undoes what it started."""
    LocalEngine().open_router(settings)  # a checkpoint that cannot be read is told before anything starts
    with ExitStack() as shown:
        if settings.address is None and settings.log_dir is None:  # a cluster of our own keeps no output
            settings = settings.model_copy(update={"log_dir": shown.enter_context(shown_logs(sys.stderr))})
        _serve_until_told(settings)
    _say("stopped")


def _serve_until_told(settings: Settings) -> None:
    with serving(settings) as stop:
        print(ready_line(settings), flush=True)
        stop.wait()
        _say("stopping (again to stop at once)")
        _drain(settings.request_timeout_s)


@contextmanager
def serving(settings: Settings, *, guest: str | None = None) -> Iterator[threading.Event]:
    """Run the application while the block lasts; gives an event that the first SIGINT or SIGTERM sets.

    ``guest`` names an application that may run beside others: at ``/guest``, at whatever address the
    cluster's Serve has, and in place of one of that name that a killed run left behind.
    """
    with ExitStack() as started:
        started.enter_context(_ray(settings))
        started.enter_context(endpoints(settings, _say, takes_any=guest is not None))
        stop = started.enter_context(stop_signals())
        started.enter_context(_application(settings, stop, guest))
        yield stop


def ready_line(settings: Settings) -> str:
    """The addresses, what a replica computes with, and a command that works."""
    from deployments.app import blas_threads

    address = f"http://{host_port(NEAREST.get(settings.host, settings.host), settings.http_port)}"
    body = {
        "model": settings.served_model_names[-1],
        "stream": True,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    key = ' -H "authorization: Bearer $DFLASH_API_KEY"' if settings.has_keys else ""
    curl = (
        f"curl -sN {address}/v1/chat/completions -H 'content-type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    names = ", ".join(settings.served_model_names)
    places = f"gRPC on port {settings.grpc_port} · console: {address}/console"
    threads = f"BLAS threads a replica: {blas_threads(settings)}"
    return f"ready: {address}/v1 serves {names} · {places} · {threads} · try: {curl}"


def _say(message: str) -> None:
    print(f"dflash-serve: {message}", file=sys.stderr, flush=True)


@contextmanager
def _ray(settings: Settings) -> Iterator[None]:
    """Join the cluster that the settings name, or run one of our own."""
    if settings.address is not None:
        with joined_cluster(settings.address, _say):
            yield
        return
    _check_port(settings.host, settings.http_port)
    _check_port(everywhere(), settings.grpc_port)
    with own_cluster(settings, _say):
        yield


@contextmanager
def _application(settings: Settings, stop: threading.Event, guest: str | None) -> Iterator[None]:
    """Run our application; on the way out delete it, and nothing else."""
    from ray import serve

    from deployments.app import APP_NAME, build

    name, route_prefix = (guest, f"/{guest}") if guest is not None else (APP_NAME, "/")
    _refuse_taken(name, route_prefix, may_replace=guest is not None)
    try:
        with _progress(name, stop):
            try:
                serve.run(build(settings), name=name, route_prefix=route_prefix)
            except RuntimeError as error:
                raise _failure(name) from error
        yield
    finally:
        with hushed():
            serve.delete(name)


def _refuse_taken(name: str, route_prefix: str, *, may_replace: bool) -> None:
    """Raise Unavailable if another application has our name, or our path. Serve would tell by a trace."""
    applications = _applications()
    if name in applications and not may_replace:
        raise Unavailable(f'an application named "{name}" runs on this cluster already')
    for other, details in applications.items():
        if other != name and details["route_prefix"] == route_prefix:
            raise Unavailable(
                f'the application "{other}" has the path {route_prefix} on this cluster: '
                f"give it a route prefix of its own, or delete it (serve.delete({other!r})), then start again"
            )


def _drain(timeout_s: float) -> None:
    from deployments.app import APP_NAME
    from deployments.draining import drain

    drain(APP_NAME, timeout_s, _say)


@contextmanager
def _progress(app_name: str, stop: threading.Event) -> Iterator[None]:
    """Say how far each deployment is; a stop signal while loading ends the wait."""
    is_done = threading.Event()

    def watch() -> None:
        said = ""
        while not is_done.wait(PROGRESS_PERIOD_S):
            deployments = _applications().get(app_name, {}).get("deployments", {})
            line = ", ".join(f"{name} {_state(d['replicas'])}" for name, d in sorted(deployments.items()))
            if line and line != said:
                said = line
                _say(f"loading: {line}")
            if stop.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()


def _applications() -> dict[str, Any]:
    """Serve's account of them, as plain data.

    ``serve.status`` would make configurations of it, which two threads may not do at once (Ray registers a
    module for each), and the other one is in ``serve.run``.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None  # or it would have raised
    return client.get_serve_details()["applications"]


def _state(replicas: Sequence[Mapping[str, str]]) -> str:
    counts = Counter(replica["state"] for replica in replicas)
    return " ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items())) or "waiting"


def _failure(app_name: str) -> DFlashError:
    """The replica's own words about why it did not start, in place of Serve's trace."""
    from ray import serve

    app = serve.status().applications.get(app_name)
    messages = [d.message for d in app.deployments.values()] if app is not None else []
    lines = [line.strip() for message in messages for line in message.splitlines()]
    for line in reversed(lines):
        if line.startswith("dflash_core.errors."):
            return CheckpointError(line.partition(": ")[2])
    causes = [line for line in lines if "Error: " in line]
    return Unavailable("the application did not start: " + (causes[-1] if causes else "see Ray's logs"))


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """The first SIGINT or SIGTERM sets the event, a second one interrupts whatever runs."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    kept = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _check_port(host: str, port: int) -> None:
    """A port in use is told here in one line, not by Serve after half a minute."""
    if (fault := bind_fault(host, port)) is not None:
        raise Unavailable(
            f"cannot listen on {host_port(host, port)}: {fault}; "
            "choose another one (--http-port, --grpc-port)"
        )
