"""The application that is broken: the embedded pair on a Ray of its own, its replicas and what they hold."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Literal, NewType, cast

import psutil
from pydantic import SecretStr
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.app import APP_NAME, build
from deployments.settings import Place, Placement, Settings
from deployments.up import serving
from tests.deployments.conftest import free_port

Deployment = Literal["Router", "Target", "Drafter"]
Pid = NewType("Pid", int)

CALL_TIMEOUT_S = 30.0
KEYS = ("calm", "flood")  # two clients
_REPLICA = f"SERVE_REPLICA::{APP_NAME}#"


class Application:
    """A running application, seen from its cluster."""

    def __init__(self, settings: Settings, stop: Event):
        self.settings = settings
        self.stop = stop  # set when this program is asked to end
        self.url = f"http://{settings.host}:{settings.http_port}"
        self.rpc_address = f"{settings.host}:{settings.grpc_port}"

    @property
    def num_rows(self) -> int:
        """Rows that may play at once."""
        settings = self.settings
        return settings.max_rows * settings.windows_per_router * settings.placement.target.replicas

    def replicas(self, deployment: Deployment) -> dict[str, Pid]:
        """Processes of the live replicas by the replica's id."""
        from ray._private.state import actors

        prefix = f"{_REPLICA}{deployment}#"
        table = cast(dict[str, dict[str, Any]], actors())
        return {
            entry["Name"].removeprefix(prefix): Pid(entry["Pid"])
            for entry in table.values()
            if entry["Name"].startswith(prefix) and entry["State"] == "ALIVE"
        }

    def proxies(self) -> list[Pid]:
        """Processes of Serve's proxies."""
        from ray._private.state import actors

        table = cast(dict[str, dict[str, Any]], actors())
        alive = [entry for entry in table.values() if entry["State"] == "ALIVE"]
        return [Pid(e["Pid"]) for e in alive if "SERVE_PROXY_ACTOR" in e["Name"]]

    def stats(self, deployment: Literal["Target", "Drafter"]) -> list[dict[str, Any]]:
        """What each replica of a deployment says of itself; those that do not answer are left out."""
        handle = serve.get_deployment_handle(deployment, APP_NAME)
        try:
            answers = handle.broadcast("stats").results(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:  # not one is there
            return []
        return [answer for answer in answers if isinstance(answer, dict)]

    def health(self) -> dict[str, Any]:
        """The router's own account."""
        handle = serve.get_app_handle(APP_NAME)
        return handle.options(method_name="health").remote().result(timeout_s=CALL_TIMEOUT_S)

    def busy_drafter(self) -> str:
        """The drafter replica that holds most windows."""
        return max(self.stats("Drafter"), key=lambda stats: stats["sessions"])["replica"]

    def leftovers(self) -> list[str]:
        """State that replicas hold although nobody asks for anything; empty when all is let go."""
        found: list[str] = []
        num_windows = 0
        for stats in self.stats("Target"):
            held = {name: stats[name] for name in ("rows", "exchange_refs", "feature_bytes") if stats[name]}
            found += [f"target {stats['lane']}: {held}"] if held else []
            num_windows += stats["windows"]  # open for who comes next, and a session each
        num_sessions = sum(stats["sessions"] for stats in self.stats("Drafter"))
        if num_sessions > num_windows:
            found.append(f"{num_sessions} drafter sessions for {num_windows} windows")
        return found

    def await_nothing_left(self, timeout_s: float) -> list[str]:
        """Wait until nothing is left over; gives what still is."""
        until = time.monotonic() + timeout_s
        while (left := self.leftovers()) and time.monotonic() < until and not self.stop.is_set():
            time.sleep(0.5)
        return left

    def await_whole(self, timeout_s: float) -> bool:
        """Wait until every deployment has all its replicas; whether it has."""
        until = time.monotonic() + timeout_s
        while not self.stop.is_set():
            states = serve.status().applications[APP_NAME].deployments.values()
            if all(state.status.value == "HEALTHY" for state in states) and self._counts_are_right():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.25)
        return False

    def redeploy(self, **changes: Any) -> None:
        """What ``serve deploy`` of a changed configuration does: every replica is replaced."""
        self.settings = self.settings.model_copy(update=changes)
        serve.run(build(self.settings), name=APP_NAME, route_prefix="/")

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each process that serves."""
        processes = {f"proxy {pid}": pid for pid in self.proxies()}
        deployments: tuple[Deployment, ...] = ("Router", "Target", "Drafter")
        for deployment in deployments:
            processes |= {f"{deployment} {name}": pid for name, pid in self.replicas(deployment).items()}
        sizes: dict[str, float] = {}
        for name, pid in processes.items():
            if psutil.pid_exists(pid):
                sizes[name] = psutil.Process(pid).memory_info().rss / 2**20
        return sizes

    def _counts_are_right(self) -> bool:
        places = self.settings.placement
        wanted: dict[Deployment, int] = {
            "Router": places.router.replicas,
            "Target": places.target.replicas,
            "Drafter": places.drafter.replicas,
        }
        return all(len(self.replicas(name)) == count for name, count in wanted.items())


def kill(*pids: Pid) -> float:
    """``kill -9``; gives the time."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@contextmanager
def stopped(pid: Pid) -> Iterator[float]:
    """Hang a process while the block lasts, as a machine that swaps or a driver that is stuck would."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def application(cache_dir: Path, **changes: Any) -> Iterator[Application]:
    """Serve the pair with two targets and two drafters until the block ends, or a signal asks to stop."""
    two = Place(replicas=2, num_cpus=0.1)
    values: dict[str, Any] = {
        "http_port": free_port(),
        "grpc_port": free_port(),
        "api_keys": tuple(SecretStr(key) for key in KEYS),
        "max_rows": 4,  # of each target, so that one has room for the rows of both
        "max_queue": 8,
        "block_width": 16,  # every round drafts, so that one without drafts is told from it
        "probe_s": 1.0,
        "session_ttl_s": 10.0,
        "request_timeout_s": 120.0,
        "window_max_age_s": 6.0,
        "cache_dir": cache_dir,
        "placement": Placement(router=Place(num_cpus=0.1), target=two, drafter=two),
    }
    settings = Settings(**(values | changes))
    with serving(settings) as stop:
        yield Application(settings, stop)
