"""The very text of ``serveConfigV2`` starts: sent to Ray over REST, with a token, as the operator does, and
from a file by ``serve run``.
"""

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import yaml
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from deployments import proxy
from tests.deployments.conftest import free_port
from tests.k8s.manifests import ROOT, pod_templates, ray_service
from tests.k8s.processes import end, wait_for

pytestmark = pytest.mark.ray

START_S = 90.0
READY_S = 180.0


@dataclass(frozen=True)
class Head:
    """A head node of its own, as in the pod: token mode, dashboard, an agent on a port of its own."""

    gcs: int
    dashboard: int
    agent: int
    token: str
    environment: dict[str, str]

    def ask(
        self, port: int, path: str, body: bytes | None = None, *, key: str | None = None, method: str = ""
    ) -> Any:
        """Send a request; GET, or PUT with a body, unless ``method`` is another. Raises HTTPError."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        method = method or ("GET" if body is None else "PUT")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data=body, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()


class Served(NamedTuple):
    """The application, where it is reached, and a key of it."""

    head: Head
    port: int
    grpc_port: int
    key: str
    folder: Path  # what a pod mounts


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = tempfile.mkdtemp(prefix="dfk", dir="/tmp")
    ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    token = secrets.token_hex(16)
    environment = {
        **os.environ,
        **proxy.VARIABLES,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "DFLASH_CALIBRATION_S": "3",
        "DFLASH_PROBE_S": "1",
    }
    (cpus,) = {
        group["rayStartParams"]["num-cpus"]
        for group in ray_service("base")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    flags = [f"--{name}={port}" for name, port in ports.items()]
    command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--num-cpus={cpus}"]
    command += [*flags, f"--temp-dir={folder}", "--object-store-memory=200000000", "--disable-usage-stats"]
    made = Head(
        gcs=ports["port"],
        dashboard=ports["dashboard-port"],
        agent=ports["dashboard-agent-listen-port"],
        token=token,
        environment=environment,
    )
    with (
        Path(folder, "start.log").open("wb") as log,
        subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            wait_for(lambda: made.ask(made.dashboard, "/api/gcs_healthz"), START_S)
            yield made
        finally:
            end(process, folder)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def served(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The application from the text, with what a pod mounts put in place."""
    folder = tmp_path_factory.mktemp("pod")
    key, grpc_port = secrets.token_hex(8), free_port()
    (folder / "keys").write_text(f"{key}\n")
    config = yaml.safe_load(
        as_on_this_machine(ray_service("base")["spec"]["serveConfigV2"], folder, grpc_port)
    )
    port = config["http_options"]["port"]
    status, _ = head.ask(
        head.dashboard, "/api/serve/applications/", json.dumps(config).encode(), key=head.token
    )
    assert status == 200

    def is_running() -> bool:
        _, body = head.ask(head.dashboard, "/api/serve/applications/", key=head.token)
        application = json.loads(body)["applications"]["dflash"]
        assert application["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), application["message"]
        return application["status"] == "RUNNING"

    wait_for(is_running, READY_S)
    return Served(head, port, grpc_port, key, folder)


def as_on_this_machine(text: str, folder: Path, grpc_port: int) -> str:
    """The pod's mounts and ports as this machine's, nothing else."""
    replaced = text
    for pods, ours in (
        ("/etc/dflash/api-keys/keys", str(folder / "keys")),
        ("/models/costs", str(folder / "costs")),
        ("host: 0.0.0.0", "host: 127.0.0.1"),
        ("port: 8000", f"port: {free_port()}"),
        ("port: 9000", f"port: {grpc_port}"),
    ):
        assert replaced.count(pods) == 1, pods
        replaced = replaced.replace(pods, ours)
    return replaced


@pytest.mark.timeout(420)
def test_the_text_of_the_configuration_starts_and_answers_with_a_key(served: Served) -> None:
    head, port, _, key, _ = served
    _, body = head.ask(port, "/v1/models", key=key)
    assert json.loads(body)["data"][0]["id"] == "dflash-embedded"
    assert "Paris" in answer_of(served)


def answer_of(served: Served) -> str:
    """What it says to a question over HTTP."""
    message = {"role": "user", "content": "What is the capital of France?"}
    ask = json.dumps({"model": "demo", "messages": [message], "temperature": 0}).encode()
    _, body = served.head.ask(served.port, "/v1/chat/completions", ask, key=served.key, method="POST")
    return json.loads(body)["choices"][0]["message"]["content"]


def health_of(served: Served) -> Any:
    """What it says of itself over gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub: Any = HealthStub(channel)  # its methods are made when it is
        return stub.Check(HealthCheckRequest(), timeout=30).status


def token_ids(served: Served) -> list[int]:
    """One answer, streamed; it must be whole."""
    message = {"role": "user", "content": "Write a Python function that adds two numbers."}
    ask = {"model": "demo", "messages": [message], "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.port}/v1/chat/completions",
        data=json.dumps({**ask, "stream": True, "return_token_ids": True}).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {served.key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    assert "data: [DONE]" in lines, lines[-3:]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@pytest.mark.timeout(600)
def test_a_changed_configuration_deployed_under_load_loses_nothing(served: Served) -> None:
    head, is_over = served.head, threading.Event()

    def application() -> Any:
        _, body = head.ask(head.dashboard, "/api/serve/applications/", key=head.token)
        return json.loads(body)["applications"]["dflash"]

    def replicas() -> set[str]:
        deployments = application()["deployments"].values()
        return {replica["replica_id"] for each in deployments for replica in each["replicas"]}

    def answers() -> list[list[int]]:
        found = []
        while not is_over.is_set():
            found.append(token_ids(served))
        return found

    reference, before = token_ids(served), replicas()
    config = application()["deployed_app_config"]
    config["args"]["max_queue"] = config["args"].get("max_queue", 64) + 1
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(answers) for _ in range(3)]
        try:
            body = json.dumps({"applications": [config]}).encode()
            assert head.ask(head.dashboard, "/api/serve/applications/", body, key=head.token)[0] == 200
            wait_for(
                lambda: application()["status"] == "RUNNING" and before.isdisjoint(replicas()), 2 * READY_S
            )
        finally:
            is_over.set()
        heard = [ids for future in asking for ids in future.result()]
    assert len(reference) == 200
    assert len(heard) > 3
    assert all(ids == reference for ids in heard)


def test_the_grpc_port_answers_too(served: Served) -> None:
    assert health_of(served) == HealthCheckResponse.SERVING


def test_without_a_key_nobody_is_answered(served: Served) -> None:
    head, port, *_ = served
    with pytest.raises(urllib.error.HTTPError, match="401"):
        head.ask(port, "/v1/models")


def test_without_the_token_nobody_deploys(served: Served) -> None:
    head = served.head
    with pytest.raises(urllib.error.HTTPError, match="401"):
        head.ask(head.dashboard, "/api/serve/applications/", b"{}")


def test_the_probes_addresses_answer_without_token_and_key(served: Served) -> None:
    head, port, *_ = served
    ours = {8265: head.dashboard, 52365: head.agent, 8000: port}
    asked = set()
    for template in pod_templates("base").values():
        for container in template["spec"]["containers"]:
            for probe in ("livenessProbe", "readinessProbe"):
                words = container[probe].get("exec", {}).get("command", ())
                asked |= {word for word in words if word.startswith("http://")}
    assert len(asked) == 3
    for address in asked:
        place, _, path = address.removeprefix("http://127.0.0.1:").partition("/")
        status, body = head.ask(ours[int(place)], f"/{path}")
        assert (status, b"success" in body.lower()) == (200, True), address


def test_what_the_service_monitor_scrapes_is_prometheus_text(served: Served) -> None:
    head, port, _, key, _ = served
    _, body = head.ask(port, "/metrics", key=key)
    assert b"vllm:spec_decode_num_accepted_tokens_total" in body


def test_the_doctor_joins_with_the_token_and_finds_the_nodes_well(served: Served) -> None:
    head, port, *_ = served
    command = ["dflash-serve", "doctor", "--no-trial", "--json", "--address", f"127.0.0.1:{head.gcs}"]
    run = subprocess.run(
        command, env=head.environment, capture_output=True, text=True, timeout=120, check=False
    )
    findings = {finding["check"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert findings["nodes"]["level"] == findings["placement"]["level"] == "ok", findings
    listening = {listener["port"]: listener for listener in findings["ports"]["facts"]["listeners"]}
    assert {head.gcs, head.dashboard, head.agent, port} <= set(listening)
    refused = subprocess.run(
        command,
        env={**head.environment, "RAY_AUTH_TOKEN": "another"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 1
    faults = [f["check"] for f in json.loads(refused.stdout)["findings"] if f["level"] == "error"]
    assert "cluster" in faults


@pytest.mark.timeout(420)
def test_serve_run_starts_the_same_text_from_a_file_until_it_is_interrupted(
    served: Served, tmp_path: Path
) -> None:
    """The last one here: Serve's ports are those of whoever started it, so what is served goes first."""
    head = served.head
    head.ask(head.dashboard, "/api/serve/applications/", key=head.token, method="DELETE")
    file = tmp_path / "serve.yaml"
    grpc_port = free_port()
    text = as_on_this_machine(ray_service("base")["spec"]["serveConfigV2"], served.folder, grpc_port)
    file.write_text(text)
    ours = served._replace(port=yaml.safe_load(text)["http_options"]["port"], grpc_port=grpc_port)
    command = ["serve", "run", str(file), f"--address=127.0.0.1:{head.gcs}"]
    # A shell that started pytest behind "&" would have made it deaf to SIGINT, and all its children.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with (
        (tmp_path / "run.log").open("wb") as log,
        subprocess.Popen(
            command, env=head.environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=listen
        ) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or is_ready(ours), READY_S)
            assert process.poll() is None, (tmp_path / "run.log").read_text()
            assert "Paris" in answer_of(ours)
            assert health_of(ours) == HealthCheckResponse.SERVING
            process.send_signal(signal.SIGINT)
            assert process.wait(READY_S) == 0
        finally:
            process.kill()
    with pytest.raises(OSError, match="refused"):
        head.ask(ours.port, "/v1/models", key=ours.key)


def is_ready(served: Served) -> bool:
    """Whether a target answers."""
    _, body = served.head.ask(served.port, "/health")
    return json.loads(body)["status"] == "ok"
