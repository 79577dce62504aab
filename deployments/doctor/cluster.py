"""A running Ray cluster: do its nodes agree, and do they offer what the placement asks for."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from deployments.doctor.finding import Finding, error, ok, warning
from deployments.doctor.software import DISTRIBUTION, versions
from deployments.nodes import Node
from deployments.settings import Settings

NODE_TIMEOUT_S = 60.0
# Ray refuses other versions of these by itself, or our own messages between replicas break.
_VITAL = (DISTRIBUTION, "python", "ray")
_FREE = ("platform", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")  # may differ: Macs beside Linux

Versions = Mapping[str, str]
T = TypeVar("T")


def describe_node() -> dict[str, str]:
    """What a node runs; called there."""
    return versions()


def ask_nodes(describe: Callable[[], T]) -> dict[str, T | Exception]:
    """What ``describe`` says on each node, by its name. Connected to the cluster already."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(describe)
    asked = {
        name: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for name, node in name_nodes(ray.nodes()).items()
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=NODE_TIMEOUT_S)
    answers: dict[str, T | Exception] = {}
    for address, reference in asked.items():
        try:
            answers[address] = ray.get(reference, timeout=0.1)
        except Exception as failure:  # a node that cannot answer is a finding, whatever the reason
            answers[address] = failure
    return answers


def name_nodes(nodes: Iterable[Node]) -> dict[str, Node]:
    """Living nodes by address; those that share a machine are told apart by their ids."""
    living = [node for node in nodes if node["Alive"]]
    shared = Counter(str(node["NodeManagerAddress"]) for node in living)
    return {_name(node, shared[str(node["NodeManagerAddress"])]): node for node in living}


def _name(node: Node, num_sharing: int) -> str:
    address = str(node["NodeManagerAddress"])
    return address if num_sharing == 1 else f"{address} ({str(node['NodeID'])[:6]})"


def check_agreement(answers: Mapping[str, Versions | Exception]) -> Iterator[Finding]:
    """Every node answers, and all say the same."""
    remedy = "install the same uv.lock on every node: make venv"
    told: dict[str, Versions] = {}
    for address, answer in answers.items():
        if isinstance(answer, Exception):
            words = f"{address} does not answer: {last_words(answer)}"
            yield error("nodes", words, f"on that node: {remedy}")
        else:
            told[address] = answer
    faults = list(_differences(told))
    for is_vital, message in faults:
        make = error if is_vital else warning
        yield make("nodes", message, remedy)
    if told and not faults:
        yield ok(
            "nodes",
            f"{len(told)} nodes agree: {', '.join(told)}",
            nodes={a: dict(v) for a, v in told.items()},
        )


def last_words(failure: Exception) -> str:
    """The end of a trace, where Ray has the reason."""
    return next((line.strip() for line in reversed(str(failure).splitlines()) if line.strip()), "silent")


def _differences(told: Mapping[str, Versions]) -> Iterator[tuple[bool, str]]:
    names = dict.fromkeys(name for answer in told.values() for name in answer if name not in _FREE)
    for name in names:
        by_version: dict[str, list[str]] = defaultdict(list)
        for address, answer in told.items():
            by_version[answer.get(name, "missing")].append(address)
        if len(by_version) > 1:
            parts = (f"{version} on {' '.join(nodes)}" for version, nodes in sorted(by_version.items()))
            yield name in _VITAL, f"{name} differs: {', '.join(parts)}"


def check_placement(settings: Settings, offered: Mapping[str, Any]) -> Iterator[Finding]:
    """The cluster's resources hold all replicas at once."""
    asked: dict[str, float] = defaultdict(float)
    for place in settings.places.values():
        for name, amount in {"CPU": place.num_cpus, **place.resources}.items():
            asked[name] += amount * place.replicas
    for name, amount in asked.items():
        there = float(offered.get(name, 0.0))
        if there < amount:
            flag = "--num-cpus" if name == "CPU" else f"--resources='{{\"{name}\": {amount:g}}}'"
            remedy = f"start a node with it (ray start {flag}), or ask for less in placement"
            yield error("placement", f"{name}: {amount:g} asked for, the cluster offers {there:g}", remedy)
    if all(float(offered.get(name, 0.0)) >= amount for name, amount in asked.items()):
        yield ok("placement", ", ".join(f"{name} {amount:g}" for name, amount in asked.items() if amount))
