"""What keeps rows from going in circles: which clusters a row has passed, and which ways lead on from here.

Every cluster has an id. A row that leaves for another cluster carries the ids of those that it has passed,
and every cluster tells whoever asks by which clusters its targets, and those behind its remote lanes, are
reached. A way through a cluster that the row has passed is none.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dflash_core.errors import Unavailable

HEADER = "dflash-via"
MAX_PASSED = 3  # clusters that a row may have passed; the last one of more than that plays it or says no

_MAX_CHARACTERS = 1024  # of the header: ids have 16

Via = tuple[str, ...]
"""Ids of the clusters that a row has passed, the first one first; none: it came from a client."""


class Circular(Unavailable):
    """The row has been here, or has gone far enough, and there are no targets here."""

    kind = "circular"


@dataclass(frozen=True, slots=True)
class Route:
    """A way to targets: the clusters on it, the next one first; those of the last one play."""

    clusters: tuple[str, ...]  # at least one
    room: int  # rows that would find a place there at once

    def is_open(self, via: Collection[str]) -> bool:
        """Whether a row that has passed these clusters, the one that asks included, may take it."""
        passed = len(via) + len(self.clusters) - 1  # when it arrives
        return passed <= MAX_PASSED and not any(cluster in via for cluster in self.clusters)


def parse_via(text: object) -> Via:
    """Read the header; what is none of ours counts as too long a way, and ends here."""
    if not text:
        return ()
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        return ("",) * MAX_PASSED
    return tuple(part.strip() for part in text.split(","))


def is_closed(via: Via, own: str) -> bool:
    """Whether a row that came this way is played on targets of this cluster or not at all."""
    return own in via or len(via) >= MAX_PASSED


def best(routes: Iterable[Route]) -> Sequence[Route]:
    """The shortest way to each cluster that plays, the nearest ones first."""
    found: dict[str, Route] = {}
    for route in sorted(routes, key=lambda route: len(route.clusters)):
        found.setdefault(route.clusters[-1], route)
    return list(found.values())
