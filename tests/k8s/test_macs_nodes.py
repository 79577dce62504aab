"""The script for Macs starts two nodes that find each other: here on Linux, on one machine, on free ports."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.conftest import free_port
from tests.k8s.manifests import K8S, ROOT
from tests.k8s.processes import end, wait_for

pytestmark = pytest.mark.ray

MACS = K8S / "macs"
PORTS = ("NODE_MANAGER_PORT", "OBJECT_MANAGER_PORT", "RUNTIME_ENV_PORT", "METRICS_PORT", "AGENT_PORT")
HEAD_PORTS = ("GCS_PORT", "DASHBOARD_PORT", "CLIENT_PORT")


@pytest.fixture(scope="module")
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


def told(address: str, key: str | None = None, body: object = None) -> Any:
    """What an address answers."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def is_up(environment: dict[str, str]) -> bool:
    """Whether a node's agent says that its raylet is well."""
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


def placed_as_shipped(folder: Path) -> Path:
    """``serve.yaml`` with the embedded pair, and with fewer CPUs: two nodes share this machine's."""
    settings = yaml.safe_load((MACS / "serve.yaml").read_text(encoding="utf-8"))
    settings |= {"target": "embedded", "drafter": "embedded", "max_context": None, "host": "127.0.0.1"}
    for place in settings["placement"].values():
        place["num_cpus"] = 0.1
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.timeout(420)
def test_the_shipped_placement_puts_the_drafter_on_another_node_than_its_target(
    nodes: dict[str, str], tmp_path: Path
) -> None:
    program = str(Path(sys.executable).with_name("dflash-serve"))
    command = [program, "up", "--config", str(placed_as_shipped(tmp_path))]
    short = {"DFLASH_CALIBRATION_S": "1", "DFLASH_PROBE_S": "1", "DFLASH_CACHE_DIR": str(tmp_path)}
    environment = (
        nodes | short | {"DFLASH_ADDRESS": f"127.0.0.1:{nodes['GCS_PORT']}", "RAY_AUTH_MODE": "token"}
    )
    url = f"http://127.0.0.1:{nodes['DFLASH_HTTP_PORT']}"
    with (
        (tmp_path / "up.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or told(f"{url}/health")["status"] == "ok", 240)
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            listed = told(
                f"http://127.0.0.1:{nodes['DASHBOARD_PORT']}/api/serve/applications/", nodes["RAY_AUTH_TOKEN"]
            )
            deployments = listed["applications"]["dflash"]["deployments"]
            where = {name: deployments[name]["replicas"][0]["node_id"] for name in deployments}
            assert where["Router"] == where["Target"] != where["Drafter"], where
            message = {"role": "user", "content": "What is the capital of France?"}
            body = {"model": "demo", "messages": [message], "temperature": 0}
            answer = told(f"{url}/v1/chat/completions", body=body)
            assert "Paris" in answer["choices"][0]["message"]["content"]
            details = answer["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 0, answer["usage"]  # the drafts came across
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
