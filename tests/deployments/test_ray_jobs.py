"""The README's commands for jobs, typed against a real cluster that serves the embedded pair."""

import json
import os
import secrets
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deployments.client import CallFailed, Client, ask
from tests.deployments.job_cluster import BIN, Cluster, application, job_cluster

pytestmark = [pytest.mark.timeout(900), pytest.mark.ray]

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "What is 12 + 30?",
    "Write an SQL query that counts all users.",
    "Name the capital of Japan, please.",
    "What is 7 times 8?",
    "Give me a JSON object with a name and an age.",
    "Write a Python function that reverses a string.",
)
BATCH = ("python", "-m", "deployments.jobs.batch", "--input", "chats.jsonl", "--output")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with (
        job_cluster(resources='{"apple_silicon": 1}') as cluster,
        application(cluster, tmp_path_factory.mktemp("up")),
    ):
        yield cluster


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A folder with a file of chats, as a laptop would have it; it travels with the job."""
    folder = tmp_path / "chats"
    folder.mkdir()
    write(folder / "chats.jsonl", {f"q{i}": body(question) for i, question in enumerate(QUESTIONS)})
    return folder


def body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    defaults = {"model": "demo", "max_tokens": 64, "temperature": 0, "return_token_ids": True}
    return {**defaults, "messages": messages, **fields}


def write(file: Path, bodies: dict[str, dict[str, Any]]) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": fields}
        for name, fields in bodies.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(output: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(line) for line in output.read_text().splitlines()]
    named = {result["custom_id"]: result for result in results}
    assert len(named) == len(results)
    return named


def token_ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def test_a_batch_gives_each_chat_the_token_ids_that_it_gets_over_http_alone(
    cluster: Cluster, chats: Path, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    outcome = cluster.submit(*BATCH, output, "--progress-every", 0.5, options=("--working-dir", str(chats)))
    assert outcome.code == 0, outcome.text
    assert f"all 8 rows are answered, in {output}" in outcome.text
    assert "accepted a round" in outcome.text
    results = read(output)
    for i, question in enumerate(QUESTIONS):
        alone = cluster.chat(body(question))
        assert token_ids(results[f"q{i}"]["response"]["body"]) == token_ids(alone), question


def test_a_job_that_is_stopped_half_way_and_submitted_again_has_every_line_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, output = tmp_path / "many", tmp_path / "answers.jsonl"
    folder.mkdir()
    bodies = {f"q{i}": body(QUESTIONS[i % 8], ignore_eos=True) for i in range(16)}
    write(folder / "chats.jsonl", bodies)
    options = ("--working-dir", str(folder))
    command = (*BATCH, output, "--in-flight", 2)
    first = cluster.ray(
        *("job", "submit", "--no-wait", "--submission-id", "stopped"), *options, "--", *command
    )
    assert first.code == 0, first.text
    until = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < until, cluster.ray("job", "logs", "stopped").text
        time.sleep(0.1)
    stopped = cluster.ray("job", "stop", "stopped")
    assert stopped.code == 0, stopped.text
    assert "run it again to go on" in cluster.ray("job", "logs", "stopped").text
    before = read(output)
    assert 4 <= len(before) < 16
    second = cluster.submit(*command, options=options)
    assert second.code == 0, second.text
    assert f"{len(before)} of 16 rows have their answer" in second.text
    after = read(output)
    assert set(after) == set(bodies)
    assert {name: after[name] for name in before} == before


def test_a_job_with_a_failed_line_fails(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    write(folder / "chats.jsonl", {"good": body("Hi"), "bad": body("Hi", max_tokens=10**6)})
    output = tmp_path / "answers.jsonl"
    outcome = cluster.submit(*BATCH, output, options=("--working-dir", str(folder)))
    assert outcome.code == 1
    assert "1 of 2 rows failed (1 context_length_exceeded)" in outcome.text
    assert read(output)["good"]["error"] is None


def test_the_token_alone_is_not_enough_on_a_laptop_without_the_mode(cluster: Cluster) -> None:
    bare = {k: v for k, v in cluster.environment.items() if k != "RAY_AUTH_MODE"}
    command = [BIN / "ray", "job", "list"]
    refused = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "RAY_AUTH_MODE" in refused.stdout + refused.stderr


def test_the_gate_runs_on_the_worker_that_has_the_resource_and_leaves_its_verdict_as_json(
    cluster: Cluster, chats: Path, tmp_path: Path
) -> None:
    output = tmp_path / "artefacts" / "parity.json"
    command = ("python", "-m", "deployments.jobs.parity", "--prompts", "chats.jsonl", "--limit", 4)
    place = ("--resources", '{"apple_silicon": 1}')
    outcome = cluster.submit(*command, "--output", output, *place, options=("--working-dir", str(chats)))
    assert outcome.code == 0, outcome.text
    report = json.loads(output.read_text())
    assert report["passed"]
    assert {check["name"] for check in report["checks"]} >= {"rows", "run was real", "broken commit fails"}
    assert all(check["is_good"] for check in report["checks"])
    assert report["worker"]["blas_threads"] == "1"


def test_the_benchmark_leaves_its_figures_as_json(cluster: Cluster, chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    command = ("python", "-m", "deployments.jobs.bench", "--prompts", "chats.jsonl", "--output", output)
    options = ("--limit", 2, "--rows", 2, "--repeat", 1, "--width", 16, "--arms", "classic,per_row")
    outcome = cluster.submit(*command, *options, options=("--working-dir", str(chats)))
    assert outcome.code == 0, outcome.text
    report = json.loads(output.read_text())
    assert [arm["name"] for arm in report["arms"]] == ["classic", "per_row"]
    assert report["arms"][1]["accepted_per_row_round"] > 0
    assert all(arm["tok_s"][0] > 0 and arm["equal_rows"] == 2 for arm in report["arms"])
    assert report["prompts"] == 2


def test_standalone_a_batch_brings_its_own_application_and_takes_it_away_again(
    cluster: Cluster, chats: Path, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    command, options = (*BATCH, output, "--standalone", "--max-rows", 4), ("--working-dir", str(chats))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(cluster.submit, *command, options=options)
        assert grpc_answers_beside_a_guest_until(cluster, job.done)
    outcome = job.result()
    assert outcome.code == 0, outcome.text
    results = read(output)
    lanes = {result["response"]["body"]["dflash"]["lane"] for result in results.values()}
    alone = cluster.chat(body(QUESTIONS[0]))
    assert alone["dflash"]["lane"] not in lanes
    assert token_ids(results["q0"]["response"]["body"]) == token_ids(alone)
    path = outcome.text.partition(f"{cluster.url}/dflash-batch-")[2].partition(",")[0]
    assert path
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cluster.chat(body("Hi"), path=f"/dflash-batch-{path}")


def grpc_answers_beside_a_guest_until(cluster: Cluster, is_over: Callable[[], bool]) -> bool:
    """Call the application again and again; tells whether a call was answered while Serve had two of them."""
    address, was_beside = f"127.0.0.1:{cluster.grpc_port}", False
    with Client(address) as client, Client(address, application=None) as nameless:
        while not is_over():
            had_two = not is_routed(nameless)
            answer = client.generate_once(ask("demo", "Once", max_tokens=2), timeout_s=60)
            assert answer.finished.usage.completion_tokens == 2
            was_beside |= had_two and not is_routed(nameless)
            time.sleep(0.2)
    return was_beside


def is_routed(client: Client) -> bool:
    """Whether Ray's proxy finds an application for these calls."""
    try:
        client.models(timeout_s=60)
    except CallFailed as error:
        if not error.details.startswith("Application metadata not set."):
            raise
        return False
    return True


def test_standalone_needs_no_cluster(chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"DFLASH_CALIBRATION_S": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [BIN / BATCH[0], *BATCH[1:], output, "--standalone", "--max-rows", "2"],
        cwd=chats,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(read(output)) == {f"q{i}" for i in range(len(QUESTIONS))}
