"""The script for Macs starts two nodes that find each other: here on Linux, on one machine, on free ports."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deployments.conftest import free_port
from tests.k8s.manifests import K8S, ROOT
from tests.k8s.processes import end, wait_for

pytestmark = pytest.mark.ray

MACS = K8S / "macs"
PORTS = ("NODE_MANAGER_PORT", "OBJECT_MANAGER_PORT", "RUNTIME_ENV_PORT", "METRICS_PORT", "AGENT_PORT")
HEAD_PORTS = ("GCS_PORT", "DASHBOARD_PORT", "CLIENT_PORT")


@pytest.fixture
def nodes() -> Iterator[dict[str, str]]:
    """A head for targets and a worker for drafters; gives the environment of the head."""
    common = {
        **os.environ,
        "VENV": str(Path(sys.executable).parents[1]),
        "NODE_ADDRESS": "127.0.0.1",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PYTHONPATH": str(ROOT),
    }
    common |= {name: str(free_port()) for name in (*HEAD_PORTS, "DFLASH_HTTP_PORT", "DFLASH_GRPC_PORT")}
    with ExitStack() as stack:
        environments = []
        for number, words in enumerate((("head", "target"), ("worker", "drafter", "127.0.0.1"))):
            folder = tempfile.mkdtemp(prefix="dfm", dir="/tmp")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            environment = common | {name: str(free_port()) for name in (*PORTS, "AGENT_GRPC_PORT")}
            environment["RAY_FOLDER"] = folder
            environment["FIRST_WORKER_PORT"] = str(21000 + 100 * number)
            environment["LAST_WORKER_PORT"] = str(21099 + 100 * number)
            log = stack.enter_context(Path(folder, "start.log").open("wb"))
            process = stack.enter_context(
                subprocess.Popen(
                    ["bash", str(MACS / "join.sh"), *words],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            stack.callback(end, process, folder)
            environments.append(environment)
            wait_for(lambda e=environment: is_up(e), 90)
        yield environments[0]


def is_up(environment: dict[str, str]) -> bool:
    """Whether a node's agent says that its raylet is well."""
    import urllib.request

    address = f"http://127.0.0.1:{environment['AGENT_PORT']}/api/local_raylet_healthz"
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.status == 200


def test_a_second_node_joins_and_the_check_finds_both_well(nodes: dict[str, str]) -> None:
    checked = subprocess.run(
        ["bash", str(MACS / "check.sh"), "127.0.0.1"],
        env=nodes,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert checked.stdout.count(" answers\n") == 4, checked.stdout
    assert "nodes: 2 nodes agree" in checked.stdout, checked.stdout
    assert checked.returncode == 0, checked.stdout
