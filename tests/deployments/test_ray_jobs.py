"""The README's commands for jobs, typed against a real cluster that serves the embedded pair."""

import json
import os
import secrets
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deployments.client import CallFailed, Client, ask
from tests.deployments.batch_jobs import BATCH, read, submit_and_stop, token_ids, unequal, write
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
    write(folder / "chats.jsonl", bodies_of(QUESTIONS))
    return folder


def body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    defaults = {"model": "demo", "max_tokens": 64, "temperature": 0, "return_token_ids": True}
    return {**defaults, "messages": messages, **fields}


def bodies_of(questions: Sequence[str], **fields: Any) -> dict[str, dict[str, Any]]:
    return {f"q{i}": body(question, **fields) for i, question in enumerate(questions)}


def test_a_batch_gives_each_chat_the_token_ids_that_it_gets_over_http_alone(
    cluster: Cluster, chats: Path, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    outcome = cluster.type_readme("batch", chats.parent, output, "--progress-every", 0.5)
    assert outcome.code == 0, outcome.text
    assert f"all 8 rows are answered, in {output}" in outcome.text
    assert "accepted a round" in outcome.text
    assert unequal(cluster, bodies_of(QUESTIONS), read(output)) == []


def test_a_job_that_is_stopped_half_way_and_submitted_again_has_every_line_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """``tests.benchmarks.batch_job`` does the same with 200 chats."""
    folder, output = tmp_path / "many", tmp_path / "answers.jsonl"
    folder.mkdir()
    bodies = bodies_of(QUESTIONS * 2, ignore_eos=True)
    write(folder / "chats.jsonl", bodies)
    command, options = (*BATCH, output, "--in-flight", 2), ("--working-dir", str(folder))
    log = submit_and_stop(cluster, command, options, output, at_lines=4)
    assert "run it again to go on" in log
    before = read(output)
    assert 4 <= len(before) < 16
    second = cluster.submit(*command, options=options)
    assert second.code == 0, second.text
    assert f"{len(before)} of 16 rows have their answer" in second.text
    after = read(output)
    assert set(after) == set(bodies)
    assert {name: after[name] for name in before} == before
    assert unequal(cluster, bodies, after) == []


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
    flags = ("--limit", 4, "--resources", '{"apple_silicon": 1}')
    outcome = cluster.type_readme("parity", chats.parent, output, *flags)
    assert outcome.code == 0, outcome.text
    report = json.loads(output.read_text())
    assert report["passed"]
    assert {check["name"] for check in report["checks"]} >= {"rows", "run was real", "broken commit fails"}
    assert all(check["is_good"] for check in report["checks"])
    assert report["worker"]["blas_threads"] == "1"


def test_the_benchmark_leaves_its_figures_as_json(cluster: Cluster, chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    flags = ("--limit", 2, "--rows", 2, "--repeat", 1, "--width", 16, "--arms", "classic,per_row")
    outcome = cluster.type_readme("bench", chats.parent, output, *flags)
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
