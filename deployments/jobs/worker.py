"""A measurement on a worker of the cluster; its report is the artefact of the job that asked for it."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Protocol, TypedDict

import typer

from deployments.cluster import joined_cluster
from deployments.jobs.files import check_outlives_job, open_input, write_text
from deployments.jobs.where import cluster_of
from deployments.measurements import Chats, Log
from dflash_core.errors import InvalidRequest

PathOption = Annotated[
    str, typer.Option("--prompts", help="Chats as an OpenAI batch file: a path or a URL that fsspec knows.")
]
OutputOption = Annotated[str, typer.Option(help="Where the report goes, as JSON: likewise.")]
CpusOption = Annotated[
    float, typer.Option(min=0.0, help="CPUs to reserve on the worker; as many threads multiply matrices.")
]
ResourcesOption = Annotated[
    str, typer.Option(help='Custom resources that the worker must have, as JSON: {"apple_silicon": 1}.')
]

_PATIENCE_S = 15.0
_THREADS = "OPENBLAS_NUM_THREADS"


class Measurement(Protocol):
    """What can travel to a worker and be played there."""

    def report(self, chats: Chats, log: Log) -> dict[str, Any]:
        """Play it, and tell as JSON."""
        ...


class Reserved(TypedDict):
    """What the worker has for itself, in Ray's words."""

    num_cpus: float
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A measurement, and where its report goes."""

    measurement: Measurement
    prompts: str
    limit: int
    output: str
    reserved: Reserved


def play(assignment: Assignment) -> dict[str, Any]:
    """Read the chats here, measure on a worker, write the report; return it.

    Raises InvalidRequest for paths that cannot be used, and what the measurement raises.
    """
    check_outlives_job(assignment.output)
    with open_input(assignment.prompts) as stream:
        text = _decoded(stream.read(), assignment.prompts)
    chats = Chats(text, PurePosixPath(assignment.prompts).name, assignment.limit)
    with joined_cluster(cluster_of(os.environ) or "auto", say, shows_workers=True):
        report = _on_worker(assignment, chats)
    text = json.dumps(report, indent=2) + "\n"
    try:
        write_text(assignment.output, text)
    except OSError:
        print(text, flush=True)  # the measurement was long, and the log is kept
        raise
    say(f"the report is in {assignment.output}")
    return report


def _on_worker(assignment: Assignment, chats: Chats) -> dict[str, Any]:
    import ray
    from ray.exceptions import RayTaskError

    reserved = assignment.reserved
    threads = str(max(1, int(reserved["num_cpus"])))
    task = ray.remote(_measure).options(
        num_cpus=reserved["num_cpus"],
        resources=reserved["resources"],
        runtime_env={"env_vars": {_THREADS: threads, "OMP_NUM_THREADS": threads}},
        max_retries=0,
    )
    running = task.remote(assignment.measurement, chats)
    say(f"waiting for a worker with {_words(reserved)}")
    try:
        if not ray.wait([running], timeout=_PATIENCE_S)[0]:
            _tell_if_impossible(reserved, ray.cluster_resources())
        return ray.get(running)
    except RayTaskError as error:
        raise error.cause from None


def _measure(measurement: Measurement, chats: Chats) -> dict[str, Any]:
    """Runs in the worker's process; what it prints comes out in the job's log."""
    import ray

    report = measurement.report(chats, lambda line: print(line, flush=True))
    report["worker"] = {"node": ray.util.get_node_ip_address(), "blas_threads": os.environ[_THREADS]}
    return report


def _tell_if_impossible(reserved: Reserved, total: Mapping[str, float]) -> None:
    asked = {"CPU": reserved["num_cpus"], **reserved["resources"]}
    short = [
        f"{name} {count:g} (there are {total.get(name, 0):g})"
        for name, count in asked.items()
        if count > total.get(name, 0)
    ]
    if short:
        say(f"no cluster of this size can give {', '.join(short)}; still waiting for nodes that may come")


def _words(reserved: Reserved) -> str:
    return ", ".join(
        [f"{reserved['num_cpus']:g} CPUs", *(f"{n} {v:g}" for n, v in reserved["resources"].items())]
    )


def reserved_of(num_cpus: float, resources: str) -> Reserved:
    """Read the flags. Raises BadParameter."""
    try:
        found = {str(name): float(count) for name, count in json.loads(resources).items()}
        return Reserved(num_cpus=num_cpus, resources=found)
    except (ValueError, TypeError, AttributeError):
        raise typer.BadParameter('--resources is JSON such as {"apple_silicon": 1}') from None


def say(message: str) -> None:
    """One line for the job's log."""
    print(f"measure: {message}", file=sys.stderr, flush=True)


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: not UTF-8 (byte {error.start})") from None
