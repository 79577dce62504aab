"""200 chats as a job that is stopped half way and submitted again, each answer held against the chat alone.

    python -m tests.benchmarks.batch_job

Starts a cluster and the application as a person would, plays ``chats.jsonl`` by ``ray job submit``, ends that
by ``ray job stop`` at half of the lines and submits it again; then asks every chat over HTTP, one at a time.
Prints one line of figures. Fails unless the second job exits with 0, every line is there once, those from
before the stop stand as they were, and all token ids are equal.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.deployments.batch_jobs import BATCH, Body, num_tokens, read, submit_and_stop, unequal, write
from tests.deployments.job_cluster import Cluster, Outcome, application, job_cluster

CHATS = Path(__file__).with_name("chats.jsonl")
JOB_S = 1800.0


@dataclass(frozen=True)
class Played:
    """What came of a batch that was stopped and submitted again."""

    before: Mapping[str, Body]  # results at the stop
    after: Mapping[str, Body]
    second: Outcome
    seconds: float  # of both jobs


def play(cluster: Cluster, bodies: Mapping[str, Body], folder: Path, in_flight: int) -> Played:
    """Submit, stop at half of the lines, submit again."""
    chats, output = folder / "chats", folder / "answers.jsonl"
    chats.mkdir()
    write(chats / "chats.jsonl", bodies)
    command, options = (*BATCH, output, "--in-flight", in_flight), ("--working-dir", str(chats))
    began = time.monotonic()
    submit_and_stop(cluster, command, options, output, at_lines=len(bodies) // 2)
    before = read(output)
    second = cluster.submit(*command, options=options, timeout_s=JOB_S)
    return Played(before, read(output), second, time.monotonic() - began)


def misses(played: Played, bodies: Mapping[str, Body]) -> list[str]:
    """What is not as it should be, but for the token ids."""
    checks = {
        f"the second job exits with {played.second.code}:\n{played.second.text}": played.second.code == 0,
        f"{len(played.before)} of {len(bodies)} lines at the stop": len(played.before) < len(bodies),
        f"{len(played.after)} of {len(bodies)} lines at the end": set(played.after) == set(bodies),
        "lines from before the stop have changed": all(
            played.after.get(name) == result for name, result in played.before.items()
        ),
    }
    return [what for what, holds in checks.items() if not holds]


def main() -> int:
    """Play, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=200, help="of the chats")
    parser.add_argument("--in-flight", type=int, default=32)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take all of it down
    lines = [json.loads(line) for line in CHATS.read_text().splitlines()][: options.limit]
    bodies = {line["custom_id"]: {**line["body"], "return_token_ids": True} for line in lines}
    with (
        tempfile.TemporaryDirectory(prefix="dft", dir="/tmp") as folder,
        job_cluster() as cluster,
        application(cluster, Path(folder)),
    ):
        played = play(cluster, bodies, Path(folder), options.in_flight)
        missed = misses(played, bodies)
        if not missed:
            began = time.monotonic()
            missed = [f"{name} has other token ids alone" for name in unequal(cluster, bodies, played.after)]
            told = (
                f"{len(bodies)} lines once, {len(played.before)} of them before the stop, "
                f"{num_tokens(played.after)} tokens; two jobs {played.seconds:.0f} s, "
                f"alone {time.monotonic() - began:.0f} s; {len(bodies) - len(missed)} equal"
            )
            print(f"{told} ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})", flush=True)
    for miss in missed:
        print(f"MISS: {miss}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
