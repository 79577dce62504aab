"""Whether each node of a cluster holds what the placement may put on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from deployments.doctor.cluster import last_words
from deployments.doctor.finding import Finding, ok, warning
from deployments.doctor.models import check_memory
from deployments.memory import BOTH, Pair, Roles, with_prefixes
from deployments.memory_limit import Limit, find_limit
from deployments.nodes import Node, hosted
from deployments.settings import Settings
from dflash_core import blas


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What a node says."""

    limit: Limit
    loaded: Roles  # replicas that are there: what they hold is no longer available


def describe_memory() -> NodeMemory:
    """What this node has; called there. Imports MLX."""
    blas.prepare()
    titles = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return NodeMemory(find_limit(), loaded_by(titles))


def loaded_by(titles: list[str]) -> Roles:
    """Roles of the replicas among processes, by their titles: ``ray::ServeReplica:dflash:Target``."""
    words = [title.replace(".", ":").split(":") for title in titles if title.startswith("ray::ServeReplica:")]
    return frozenset(role for role in BOTH if any(role in parts for parts in words))


def check_nodes(
    settings: Settings, pair: Pair, nodes: Mapping[str, Node], answers: Mapping[str, NodeMemory | Exception]
) -> Iterator[Finding]:
    """Hold each node's memory against the roles that its resources let it have, both if it has both."""
    for name, node in nodes.items():
        roles = hosted(settings, node["Resources"]) & BOTH
        if roles:
            yield _check(settings, pair, f"{name}, for {_words(roles)}: ", roles, answers[name])


def _check(
    settings: Settings, pair: Pair, where: str, roles: Roles, answer: NodeMemory | Exception
) -> Finding:
    if isinstance(answer, Exception):
        remedy = "run dflash-serve doctor on that node"
        return warning("memory", f"{where}its memory is not known ({last_words(answer)})", remedy)
    missing = roles - answer.loaded
    if not missing:
        return ok("memory", f"{where}loaded already", limit=answer.limit.bytes)
    sized = with_prefixes(pair, settings.wanted_prefix_bytes, answer.limit)
    return check_memory(sized, answer.limit, missing, where)


def _words(roles: Roles) -> str:
    return " and ".join(sorted((role.lower() for role in roles), reverse=True))
