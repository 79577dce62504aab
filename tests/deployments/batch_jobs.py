"""Batches as jobs: their files, a stop half way, and answers held against those of each request alone."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deployments.job_cluster import Cluster

BATCH = ("python", "-m", "deployments.jobs.batch", "--input", "chats.jsonl", "--output")

Body = dict[str, Any]


def write(file: Path, bodies: Mapping[str, Body]) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": fields}
        for name, fields in bodies.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(output: Path) -> dict[str, dict[str, Any]]:
    """Results by ``custom_id``, each of which is there once."""
    results = [json.loads(line) for line in output.read_text().splitlines()]
    named = {result["custom_id"]: result for result in results}
    assert len(named) == len(results)
    return named


def token_ids(answer: Body) -> list[int]:
    return answer["choices"][0]["token_ids"]


def submit_and_stop(
    cluster: Cluster, command: tuple[object, ...], options: tuple[str, ...], output: Path, at_lines: int
) -> str:
    """Submit a batch, and stop it once so many lines are written; gives its log."""
    name = f"stopped-{time.monotonic_ns()}"
    waiting = ("--no-wait", "--submission-id", name)
    submitted = cluster.ray("job", "submit", *waiting, *options, "--", *command)
    assert submitted.code == 0, submitted.text
    until = time.monotonic() + 600
    while not output.exists() or output.read_bytes().count(b"\n") < at_lines:
        assert time.monotonic() < until, cluster.ray("job", "logs", name).text
        time.sleep(0.1)
    stopped = cluster.ray("job", "stop", name)
    assert stopped.code == 0, stopped.text
    return cluster.ray("job", "logs", name).text


def unequal(cluster: Cluster, bodies: Mapping[str, Body], results: Mapping[str, Body]) -> list[str]:
    """Names of those whose token ids are not those that the same request gets over HTTP alone."""
    return [
        name
        for name, body in bodies.items()
        if token_ids(results[name]["response"]["body"]) != token_ids(cluster.chat(body))
    ]


def num_tokens(results: Mapping[str, Body]) -> int:
    return sum(len(token_ids(result["response"]["body"])) for result in results.values())
