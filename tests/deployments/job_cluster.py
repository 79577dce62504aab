"""A cluster as a person would start it, with ``ray start``, and what they would type to use it.

Nothing here calls Ray's Python interface: everything goes through the commands of the README.
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deployments.conftest import free_port
from tests.deployments.readme import readme

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Cluster:
    """A head on this machine, and the environment of a laptop that may use it."""

    address: str
    environment: Mapping[str, str]
    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def submit(self, *command: object, options: tuple[str, ...] = (), timeout_s: float = 300) -> "Outcome":
        """``ray job submit`` with ``options``, waited for."""
        return self.ray("job", "submit", *options, "--", *command, timeout_s=timeout_s)

    def ray(self, *command: object, timeout_s: float = 60) -> "Outcome":
        return _outcome([BIN / "ray", *map(str, command)], self.environment, timeout_s)

    def type_readme(self, module: str, folder: Path, output: Path, *flags: object) -> "Outcome":
        """The README's lines for a job, typed where nothing of the cluster is set, but for places and flags.

        ``folder`` has the job's working directory, ``chats``; ``output`` is where its results go.
        """
        *exports, batch, parity, bench = readme("", "ray job submit").splitlines()
        command = next(line for line in (batch, parity, bench) if f" deployments.jobs.{module} " in line)
        script = "\n".join([*exports, f"{command} {shlex.join(map(str, flags))}"])
        places = {
            "http://HEAD:8265": self.environment["RAY_API_SERVER_ADDRESS"],
            "$HOME/.ray/auth_token": self.environment["RAY_AUTH_TOKEN_PATH"],
            "/shared/": f"{output.parent}/",
        }
        for place, ours in places.items():
            assert place in script
            script = script.replace(place, shlex.quote(ours))
        assert f"--output {output} " in script
        bare = {name: value for name, value in self.environment.items() if not name.startswith("RAY_A")}
        return _outcome(["bash", "-ec", script], bare, 300, folder)

    def chat(self, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """One request over HTTP, alone."""
        request = urllib.request.Request(
            f"{self.url}{path}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and all that it printed."""

    code: int
    text: str


def _outcome(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    timeout_s: float,
    folder: Path | None = None,
) -> Outcome:
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Outcome(done.returncode, done.stdout)


@contextmanager
def job_cluster(*, resources: str = "{}") -> Iterator[Cluster]:
    """Start a head with its dashboard, which takes jobs; it and all its processes end with the block."""
    with ExitStack() as undo:
        folder = tempfile.mkdtemp(prefix="dfj", dir="/tmp")
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment |= {
            "PATH": os.pathsep.join([str(BIN), environment["PATH"]]),  # jobs take python from the head's PATH
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "DFLASH_CALIBRATION_S": "0",
            "DFLASH_PROBE_S": "1",
        }
        gcs_port, dashboard_port = free_port(), free_port()
        options = {
            "port": gcs_port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard_port,
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "metrics-export-port": free_port(),
            "runtime-env-agent-port": free_port(),
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": 8,
            "resources": resources,
            "object-store-memory": 200 * 2**20,
            "temp-dir": folder,
            "system-config": '{"worker_niceness": 0}',
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        log = undo.enter_context(Path(folder, "head.log").open("w+"))
        head = subprocess.Popen(
            [BIN / "ray", "start", "--head", "--block", *flags],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        undo.callback(_end, head)
        environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{dashboard_port}"
        cluster = Cluster(f"127.0.0.1:{gcs_port}", environment, free_port(), free_port())
        _await(lambda: cluster.ray("job", "list").code == 0, head, Path(log.name))
        yield cluster


@contextmanager
def application(cluster: Cluster, folder: Path) -> Iterator[None]:
    """``dflash-serve up --address``: the embedded pair, until the block ends."""
    log = folder / "up.log"
    ports = ["--http-port", str(cluster.http_port), "--grpc-port", str(cluster.grpc_port)]
    flags = ["--address", cluster.address, *ports, "--max-rows", "4"]
    command = [BIN / "dflash-serve", "up", *flags]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=cluster.environment, stdout=out, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        _await(lambda: "ready: " in log.read_text(), server, log)
        yield
    finally:
        _end(server)


def _await(
    is_ready: Callable[[], bool], process: subprocess.Popen, log: Path, timeout_s: float = 180
) -> None:
    until = time.monotonic() + timeout_s
    while not is_ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.5)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
