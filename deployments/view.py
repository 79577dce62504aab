"""What a router shows of itself: counts, and the last rounds of its windows. Integers and labels, never text.

Plain data that travels between routers and, by ``console``, to a viewer.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.telemetry import Snapshot
from dflash_core.events import FinishReason, RoundReport, RowProgress

NUM_ROUNDS = 24  # kept of each window
_LABEL_BYTES = 3


def row_label(row_id: str) -> str:
    """What a row is called before strangers: tells rows apart, and nothing of an id that a client chose."""
    return hashlib.blake2b(row_id.encode(), digest_size=_LABEL_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class RowTrace:
    """One row in one round."""

    label: str
    drafted: int
    walked: int
    accepted: int
    own: int  # tokens that are the target's own: the bonus, and a first one from reading the prompt
    finish: FinishReason | None = None

    @classmethod
    def of(cls, row: RowProgress) -> "RowTrace":
        """The numbers of a row's progress."""
        own = len(row.tokens) - row.accepted
        return cls(row_label(row.row_id), row.drafted, row.walked, row.accepted, own, row.finish)


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of a window."""

    number: int  # from 1 in each window
    width: int
    seconds: float
    rows: tuple[RowTrace, ...]

    @classmethod
    def of(cls, report: RoundReport) -> "RoundTrace":
        """The numbers of a report."""
        rows = tuple(RowTrace.of(row) for row in report.rows[: report.live_rows])
        return cls(report.round_index, report.width, sum(report.seconds.values()), rows)


@dataclass(frozen=True, slots=True)
class WindowView:
    """A window that is open."""

    window_id: str
    lane: str
    is_joinable: bool
    num_rows: int
    rounds: tuple[RoundTrace, ...]  # the last ones, oldest first


@dataclass(frozen=True, slots=True)
class RouterView:
    """A router at one moment."""

    snapshot: Snapshot
    windows: tuple[WindowView, ...]
    at: float  # unix seconds by that router's clock; for rates of its own counters only

    @classmethod
    def now(cls, snapshot: Snapshot, windows: Sequence[WindowView] = ()) -> "RouterView":
        """A view of this moment."""
        return cls(snapshot, tuple(windows), time.time())

    @property
    def engine(self) -> str:
        """The router's name."""
        return self.snapshot.engine


@dataclass(frozen=True, slots=True)
class Overview:
    """All routers of an application."""

    asked: str  # engine of the router that answers
    routers: tuple[RouterView, ...]
    num_missing: int = 0  # routers that did not answer
