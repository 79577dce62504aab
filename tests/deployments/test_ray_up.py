"""``dflash-serve up`` as a person types it: a cluster of its own, or beside others on one that runs."""

import json
import os
import re
import secrets
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.endpoints import Endpoints
from deployments.listening import bind_fault
from deployments.settings import Settings
from tests.deployments.conftest import free_port
from tests.deployments.job_cluster import BIN, Cluster, job_cluster
from tests.deployments.ray_client import wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.ray]

READY_S = 240.0
QUICK = {"DFLASH_CALIBRATION_S": "0", "DFLASH_PROBE_S": "1"}
DUMMY = """
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Dummy:
    def __call__(self, request):
        return "dummy"

app = Dummy.bind()
"""


@dataclass
class Up:
    """A running ``dflash-serve up`` and what it writes."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def await_ready(self) -> str:
        """Its ready line."""
        wait_until(lambda: "\n" in self.out or self.process.poll() is not None, READY_S)
        assert self.process.poll() is None, self.err
        return self.out

    def terminate(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[list[Up]]:
    """Those of one test; whatever still runs is ended."""
    started: list[Up] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.terminate()


def start(ups: list[Up], tmp_path: Path, environment: Mapping[str, str], *flags: object) -> Up:
    folder = tmp_path / f"up-{len(ups)}"
    folder.mkdir()
    command = [BIN / "dflash-serve", "up", "--max-rows", "2", *map(str, flags)]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, env=dict(environment), stdout=out, stderr=err, cwd=folder)
    ups.append(Up(process, folder))
    return ups[-1]


def said(stream: str) -> str:
    """The text of a streamed chat."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def folders_of(up: Up, tree: list[psutil.Process]) -> set[Path]:
    """Temporary folders that its processes name, and that it reads logs from."""
    words = [word for process in tree for word in process.cmdline()]
    words += [file.path for file in psutil.Process(up.process.pid).open_files()]
    return {Path(found) for word in words for found in re.findall(r"/[^\s=:]*/dflash-[^/\s]+", word)}


def test_a_cluster_of_its_own_serves_by_the_printed_line_and_leaves_nothing(
    ups: list[Up], tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # Another cluster's address is nothing to it: only --address joins one.
    environment |= {**QUICK, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": "127.0.0.1:1"}
    http_port, grpc_port = free_port(), free_port()
    up = start(ups, tmp_path, environment, "--http-port", http_port, "--grpc-port", grpc_port)
    ready = up.await_ready()
    tree = psutil.Process(up.process.pid).children(recursive=True)
    folders = folders_of(up, tree)
    assert len(tree) > 4
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)

    curl = subprocess.run(
        ready.partition("try: ")[2], shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Paris" in said(curl.stdout)

    assert up.terminate() == 0, up.err
    assert up.out == ready
    wait_until(lambda: not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    assert not [folder for folder in folders if folder.exists()]
    assert (bind_fault("127.0.0.1", http_port), bind_fault("127.0.0.1", grpc_port)) == (None, None)


@dataclass(frozen=True)
class Others:
    """Applications of others on a cluster, deployed over REST as they would."""

    cluster: Cluster
    settings: Settings  # where its Serve listens
    folder: Path

    def deploy(self, **prefixes: str) -> None:
        """These and no others, by name; those that ``up`` runs are left alone."""
        wanted = Endpoints.wanted(self.settings)
        environment = {"env_vars": {"PYTHONPATH": str(self.folder)}}
        config = {
            "http_options": {"host": wanted.host, "port": wanted.http_port},
            "grpc_options": {
                "port": wanted.grpc_port,
                "grpc_servicer_functions": sorted(wanted.grpc_functions),
            },
            "applications": [
                {"name": name, "route_prefix": prefix, "import_path": "dummy:app", "runtime_env": environment}
                for name, prefix in prefixes.items()
            ],
        }
        self._ask(config)
        wait_until(lambda: self.running() >= set(prefixes), 120)

    def running(self) -> set[str]:
        applications = self._ask()["applications"]
        return {name for name, details in applications.items() if details["status"] == "RUNNING"}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.cluster.url}{path}", timeout=30) as answer:
            return answer.read().decode()

    def _ask(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        environment = self.cluster.environment
        request = urllib.request.Request(
            f"{environment['RAY_API_SERVER_ADDRESS']}/api/serve/applications/",
            None if config is None else json.dumps(config).encode(),
            {
                "content-type": "application/json",
                "authorization": f"Bearer {Path(environment['RAY_AUTH_TOKEN_PATH']).read_text()}",
            },
            method="GET" if config is None else "PUT",
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Others]:
    folder = tmp_path_factory.mktemp("others")
    (folder / "dummy.py").write_text(DUMMY)
    with job_cluster() as cluster:
        settings = Settings(http_port=cluster.http_port, grpc_port=free_port())
        yield Others(cluster, settings, folder)


def test_a_cluster_with_applications_of_others_is_joined_as_it_is_or_not_at_all(
    others: Others, ups: list[Up], tmp_path: Path
) -> None:
    others.deploy(dummy="/dummy", landing="/")
    cluster, settings = others.cluster, others.settings
    http, rpc = ("--http-port", settings.http_port), ("--grpc-port", settings.grpc_port)
    place = (tmp_path, cluster.environment, "--address", cluster.address)

    other_port = free_port()
    refused = [
        start(ups, *place, "--http-port", other_port, *rpc),
        start(ups, *place, *http, "--grpc-port", other_port),
        start(ups, *place, *http, *rpc),
    ]
    assert [up.process.wait(180) for up in refused] == [1, 1, 1]
    assert [up.out for up in refused] == ["", "", ""]
    by_http, by_grpc, by_path = (up.err for up in refused)
    found = f"HTTP at 127.0.0.1:{settings.http_port}, gRPC on port {settings.grpc_port} ("
    assert found in by_http
    assert f"asked for: HTTP at 127.0.0.1:{other_port}, " in by_http
    assert found in by_grpc
    assert f"gRPC on port {other_port} (" in by_grpc
    assert 'the application "landing" has the path /' in by_path
    assert not any("Traceback" in up.err for up in refused)
    assert others.running() == {"dummy", "landing"}

    others.deploy(dummy="/dummy")
    wait_until(lambda: others.running() == {"dummy"}, 60)
    up = start(ups, *place, *http, *rpc)
    up.await_ready()
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = cluster.chat({"model": "demo", "messages": [question], "temperature": 0})
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert others.running() == {"dummy", "dflash"}
    assert others.get("/dummy") == "dummy"

    assert up.terminate() == 0, up.err
    assert others.running() == {"dummy"}
    assert others.get("/dummy") == "dummy"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        others.get("/v1/models")
