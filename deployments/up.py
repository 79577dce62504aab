"""``dflash-serve up``: start Ray and Serve, or join them, serve until told to stop, leave nothing behind."""

import json
import logging
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.engine import LocalEngine
from deployments.settings import Settings
from dflash_core.errors import CheckpointError, DFlashError, Unavailable

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaState

MOST_OBJECT_STORE_BYTES = 2 * 2**30
PROGRESS_PERIOD_S = 0.5


def up(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises DFlashError where it cannot; undoes what it started."""
    LocalEngine().open_router(settings)  # a checkpoint that cannot be read is told before anything starts
    with ExitStack() as started:
        started.enter_context(_ray(settings))
        started.enter_context(_serve(settings))
        stop = started.enter_context(_stop_signals())
        started.enter_context(_application(settings, stop))
        print(ready_line(settings), flush=True)
        stop.wait()
        _say("stopping: waiting for running requests (again to stop at once)")


def ready_line(settings: Settings) -> str:
    """The addresses, and a command that works."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    address = f"http://{host}:{settings.http_port}"
    body = {
        "model": settings.served_model_names[-1],
        "stream": True,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    key = ' -H "authorization: Bearer $DFLASH_API_KEY"' if settings.api_keys_file is not None else ""
    curl = (
        f"curl -sN {address}/v1/chat/completions -H 'content-type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    return f"ready: {address}/v1 serves {', '.join(settings.served_model_names)} · try: {curl}"


def _say(message: str) -> None:
    print(f"dflash-serve: {message}", file=sys.stderr, flush=True)


@contextmanager
def _ray(settings: Settings) -> Iterator[None]:
    """Join the cluster that the settings name, or run one of our own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if settings.address is None:
        _check_port(settings)
        _prepare_token()
    import ray

    if settings.address is not None:
        _say(f"joining Ray at {settings.address}")
        try:
            ray.init(address=settings.address, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:
            raise Unavailable(f"Ray at {settings.address} cannot be joined: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    _say("starting Ray")
    folder = tempfile.mkdtemp(prefix="dflash-", dir="/tmp")  # a short path: sockets live in it
    try:
        ray.init(
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
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _serve(settings: Settings) -> Iterator[None]:
    """Use the Serve that runs if its addresses are ours, else start it; stop it only if it was not there."""
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        found, wanted = client.http_config, (settings.host, settings.http_port)
        if (found.host, found.port) != wanted:
            raise Unavailable(
                f"Serve already runs on this cluster with HTTP at {found.host}:{found.port}, and "
                f"{settings.host}:{settings.http_port} was asked for. Its addresses are fixed while it runs: "
                "give the same ones, or stop that Serve first"
            )
        yield
        return
    _say(f"starting Serve on {settings.host}:{settings.http_port}")
    serve.start(http_options={"host": settings.host, "port": settings.http_port})
    try:
        yield
    finally:
        serve.shutdown()


@contextmanager
def _application(settings: Settings, stop: threading.Event) -> Iterator[None]:
    """Run our application; on the way out drain it and delete it, and nothing else."""
    from ray import serve

    from deployments.app import APP_NAME, build

    if APP_NAME in serve.status().applications:
        raise Unavailable(f'an application named "{APP_NAME}" runs on this cluster already')
    try:
        with _progress(APP_NAME, stop):
            try:
                serve.run(build(settings), name=APP_NAME, route_prefix="/")
            except RuntimeError as error:
                raise _failure(APP_NAME) from error
        yield
    finally:
        serve.delete(APP_NAME)


@contextmanager
def _progress(app_name: str, stop: threading.Event) -> Iterator[None]:
    """Say how far each deployment is; a stop signal while loading ends the wait."""
    from ray import serve

    is_done = threading.Event()

    def watch() -> None:
        said = ""
        while not is_done.wait(PROGRESS_PERIOD_S):
            app = serve.status().applications.get(app_name)
            states = app.deployments.items() if app is not None else ()
            line = ", ".join(f"{name} {_state(d.replica_states)}" for name, d in sorted(states))
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


def _state(replicas: "Mapping[ReplicaState, int]") -> str:
    return " ".join(f"{count} {name.lower()}" for name, count in sorted(replicas.items())) or "waiting"


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
def _stop_signals() -> Iterator[threading.Event]:
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


def _check_port(settings: Settings) -> None:
    """A port in use is told here in one line, not by Serve after half a minute."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.http_port))
        except OSError as error:
            where = f"{settings.host}:{settings.http_port}"
            raise Unavailable(f"cannot listen on {where}: {error.strerror}; choose another port") from error


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
