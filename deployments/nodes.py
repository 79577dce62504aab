"""The nodes of a running Ray cluster: what they offer, and whom they can host."""

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.settings import Place, Settings

Node = Mapping[str, Any]  # as ``ray.nodes`` tells of it


def is_one_machine(nodes: Iterable[Node]) -> bool:
    """Whether all replicas are on one node, since no other has a CPU for them."""
    return sum(bool(node["Alive"] and node["Resources"].get("CPU", 0.0)) for node in nodes) == 1


def hosted(settings: Settings, offered: Mapping[str, float]) -> frozenset[str]:
    """Names of the deployments of which a node with these resources can hold a replica."""
    return frozenset(name for name, place in settings.places.items() if _fits(place, offered))


def _fits(place: Place, offered: Mapping[str, float]) -> bool:
    asked = {"CPU": place.num_cpus, **place.resources}
    return all(offered.get(name, 0.0) >= amount for name, amount in asked.items())
