"""What a router knows of its lanes: how many rows each takes, how busy it is, whether it is worth asking now.

Every lane publishes its standing, which routers read about once a second (``Standing``); what a router sees
for itself in the meantime (rounds, refusals, losses) is added to it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from deployments.ticket import Ticket

ANYWHERE = ""  # the lane of a window that goes wherever Serve sends it; used while no lane is known
LOCAL = "targets"  # the source of what this cluster's targets say of themselves
NEWEST = 0.2  # weight of the newest round in a lane's mean


class Terms(Protocol):
    """What a lane elsewhere takes rows on."""

    def objection(self, ticket: "Ticket") -> str | None:
        """Why it takes none like this one; None: it does."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """What a lane says of itself."""

    lane: str
    num_rows: int = 0  # of all routers
    max_rows: int | None = None  # of one window, where it is not what the settings say
    round_s: float = 0.0  # mean of recent rounds; 0 before the first
    room: int | None = None  # rows that would find a place at once; None: as many as its windows leave
    favours_two: bool = False  # windows that alternate, over one of the same rows, as it measured
    terms: Terms | None = None  # None: a lane of this cluster, which takes them all


@dataclass(slots=True)
class LaneView:
    """A lane as one router sees it."""

    standing: Standing
    source: str  # who tells of it
    max_rows: int
    round_s: float = 0.0
    num_placed: int = 0  # rows that we gave it since its last word
    pause_s: float = 0.0
    is_pausing: bool = False

    @property
    def name(self) -> str:
        """The lane's name."""
        return self.standing.lane

    @property
    def is_own(self) -> bool:
        """Whether its target is one of this cluster's."""
        return self.standing.terms is None

    def objection(self, ticket: "Ticket") -> str | None:
        """Why it takes no row like this one; None: it does."""
        terms = self.standing.terms
        return None if terms is None else terms.objection(ticket)

    def takes(self, ticket: "Ticket") -> bool:
        """Whether a row like this one may go there."""
        return self.objection(ticket) is None

    @property
    def room(self) -> float:
        """Rows that it would take now, whatever its windows leave."""
        room = self.standing.room
        return float("inf") if room is None else max(0, room - self.num_placed)

    def load(self, num_rows: int) -> int:
        """Rows on it: ``num_rows`` of ours, or those of all routers if it knows of more."""
        return max(num_rows, self.standing.num_rows)

    def expected_wait_s(self, num_rows: int, typical_s: float = 0.0) -> float:
        """What a new row beside ``num_rows`` of ours waits for: the round at hand, a share of the next.

        ``typical_s`` is a round of a lane that has not played yet.
        """
        return (self.round_s or typical_s) * (1 + self.load(num_rows) / self.max_rows)

    def observe_round(self, seconds: float) -> None:
        """A round was played; whatever kept us from the lane is over."""
        self.pause_s = 0.0
        if seconds <= 0:  # the first word of a remote lane
            return
        self.round_s += (seconds - self.round_s) * (NEWEST if self.round_s else 1.0)


class Board:
    """The lanes that may be asked for a window."""

    def __init__(self, max_rows: int, *, is_anywhere_open: bool = True):
        """``max_rows`` of a window; ``is_anywhere_open``: while none is known, Serve may find one."""
        self.anywhere = LaneView(Standing(ANYWHERE), "", max_rows)
        self._max_rows = max_rows
        self._lanes: dict[str, LaneView] = {}
        self._is_anywhere_open = is_anywhere_open
        self._has_word = False  # of this cluster's targets

    def __iter__(self) -> Iterator[LaneView]:
        """Lanes that are known."""
        return iter(self._lanes.values())

    def __len__(self) -> int:
        """How many they are."""
        return len(self._lanes)

    def __contains__(self, name: str) -> bool:
        """Whether this lane is known."""
        return name in self._lanes

    def __getitem__(self, name: str) -> LaneView:
        """A lane by name; one that is gone, or not known yet, is as any."""
        return self._lanes.get(name, self.anywhere)

    @property
    def is_silent(self) -> bool:
        """Whether it is not known yet if there is a lane, as right after the start."""
        return self._is_anywhere_open and not self._lanes and not self._has_word

    @property
    def promising(self) -> Iterable[LaneView]:
        """Lanes whose places may be reckoned with; while nothing is known, those of a window somewhere."""
        return (self.anywhere,) if self.is_silent else self._lanes.values()

    def takes_windows(self, name: str) -> bool:
        """Whether this lane's source named it in its last word; one that drains is not named."""
        return name in self._lanes and bool(self._lanes[name].source)

    def hear(self, source: str, standings: Iterable[Standing]) -> None:
        """Take a source's word: its lanes are these and no others."""
        told = {standing.lane: standing for standing in standings}
        own = (LOCAL, "") if source == LOCAL else (source,)  # a lane that only a window told of is its too
        for name in [view.name for view in self._lanes.values() if view.source in own]:
            if name not in told:
                del self._lanes[name]
        self._has_word |= source == LOCAL
        for standing in told.values():
            view = self._lanes.get(standing.lane)
            if view is None:
                view = self._lanes[standing.lane] = LaneView(standing, source, self._max_rows)
            view.standing, view.num_placed, view.source = standing, 0, source
            view.round_s = standing.round_s or view.round_s
            view.max_rows = standing.max_rows or view.max_rows

    def add(self, name: str, max_rows: int | None) -> None:
        """A window was opened on this lane."""
        if name not in self._lanes:
            self._lanes[name] = LaneView(Standing(name), "", self._max_rows)
        if max_rows is not None:
            self._lanes[name].max_rows = max_rows
