"""What router and target say to each other about a window. Integers and strings only, never arrays.

Router to target, through the inbox: ``Command``s. Target to router, in the stream of the opening call:
one ``Opened`` or ``Refused``, then ``Played`` per round, then ``Closed``; from a remote lane also
``Returned``. A stream that breaks off without ``Closed`` means that the replica is gone.
"""

from dataclasses import dataclass, field
from typing import Literal

from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest, WindowId


@dataclass(frozen=True, slots=True)
class Admit:
    """A row joins. ``via``: clusters that it has passed, which a remote lane must be told."""

    request: RowRequest
    via: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retire:
    """A row leaves before its end: client gone, stop string found, or deadline passed."""

    row_id: RowId


@dataclass(frozen=True, slots=True)
class LastCall:
    """No more joins: the window ends with its last row."""


Command = Admit | Retire | LastCall


@dataclass(frozen=True, slots=True)
class Letter:
    """A command with its number. Numbers rise by one in each window, from 1; the target acknowledges the
    last one it carried out. Ray may deliver calls to an actor out of order, so letters are read by number.
    """

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class Opening:
    """The argument of the opening call; its letters are the first ones of the window."""

    window_id: WindowId
    letters: tuple[Letter, ...]
    lane: str = ""  # that it is meant for; none: whichever answers


@dataclass(frozen=True, slots=True)
class Opened:
    """The window is open. ``lane`` names the replica, which may play fewer rows than the settings allow."""

    lane: str
    max_rows: int | None = None
    is_own: bool = True  # a replica of this cluster


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has no place for a window."""

    kind: Literal["lane_full", "unavailable"]
    lane: str


@dataclass(frozen=True, slots=True)
class Played:
    """One round, and the number of the last letter that was carried out before it."""

    report: RoundReport
    acknowledged: int
    exchange: "Traffic | None" = None  # what went to the drafter since the last message


@dataclass(frozen=True, slots=True)
class Returned:
    """A row that the lane gives back while its window goes on; it opens elsewhere."""

    row_id: RowId
    was_playing: bool  # it had a place and lost it; else there was no room for it
    retry_after_s: float = 0.0  # how long it makes no sense to ask this lane again


@dataclass(frozen=True, slots=True)
class Closed:
    """The window is over. Rows that are still alive, or were never acknowledged, open elsewhere."""

    reason: Literal["finished", "inbox_lost", "failed"] = "finished"
    detail: str = ""  # for logs


@dataclass(slots=True)
class Traffic:
    """Calls and feature bytes from target to drafter, by transport."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    failures: int = 0  # drafts that did not come in time, or at all
    mismatches: int = 0  # of them, those that met a drafter of another fingerprint
    contexts_lost: int = 0  # rows that go on without drafts: their context cannot be made again

    def add(self, other: "Traffic") -> None:
        """Sum up."""
        for mine, more in ((self.calls, other.calls), (self.bytes, other.bytes)):
            for name, count in more.items():
                mine[name] = mine.get(name, 0) + count
        self.failures += other.failures
        self.mismatches += other.mismatches
        self.contexts_lost += other.contexts_lost


Answer = Opened | Refused | Played | Returned | Closed
