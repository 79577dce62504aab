"""Where the next row goes: the lane with room and the least expected wait, there the first such window.

A lane that has read the beginning of its prompt is better if it is not much busier. Where two windows that
alternate are faster than one, the rows of one are shared between two.
"""

from collections.abc import Collection, Iterable, Mapping

from deployments.burst import BurstWindow
from deployments.lanes import Board, LaneView
from deployments.ticket import Ticket

# A row more in a lane delays an answer there as much as so many prompt tokens to read: on two x86-64 cores an
# answer of 60 tokens of the embedded pair takes a quarter of a second longer for each row beside it.
ROW_TOKENS = 128

Place = tuple[LaneView, BurstWindow | None]


class Places:
    """Free places at one moment, from one pass over a router's windows. ``max_windows`` is for each lane."""

    def __init__(self, board: Board, windows: Iterable[BurstWindow], max_windows: int):
        self._board = board
        self._max_windows = max_windows
        self._windows: dict[str, list[BurstWindow]] = {}
        for window in windows:
            self._windows.setdefault(window.lane, []).append(window)

    def best(self, but: Collection[str] = ()) -> Place | None:
        """A lane and its window to join, None where one has to be opened; None if there is no room at all.

        Of lanes that promise the same, the one with the fewest rows of ours, first one that has not played
        yet; none of those named ``but``.
        """
        best: LaneView | None = None
        least: tuple[float, int, float] = (0.0, 0, 0.0)
        typical_s = min((lane.round_s for lane in self._board if lane.round_s), default=0.0)
        for lane in self._board:
            if lane.name in but or not self._is_free(lane):
                continue
            num_rows = self._num_rows(lane)
            rank = (lane.expected_wait_s(num_rows, typical_s), num_rows, lane.round_s)
            if best is None or rank < least:
                best, least = lane, rank
        return None if best is None else (best, self._joinable(best))

    def nearer(self, place: Place, ticket: Ticket, shared: Mapping[str, int]) -> Place:
        """A lane that has read more of the prompt, where that is worth its being busier; else ``place``.

        ``shared``: leading tokens of it, by lane.
        """
        nearest, least = place[0], shared.get(place[0].name, 0)
        worth = least - ROW_TOKENS * nearest.load(self._num_rows(nearest))
        for lane in self._board:
            tokens = shared.get(lane.name, 0)
            if tokens <= least or not self._is_free(lane) or not self.takes(lane, ticket):
                continue
            if (better := tokens - ROW_TOKENS * lane.load(self._num_rows(lane))) > worth:
                nearest, worth = lane, better
        return place if nearest is place[0] else (nearest, self._joinable(nearest))

    def takes(self, lane: LaneView, ticket: Ticket) -> bool:
        """Whether a row may go there beside those that are there."""
        if not lane.takes(ticket):
            return False
        windows = self._windows.get(lane.name, ())
        return not ticket.is_unproven or ticket.may_join(t for w in windows for t in w.tickets.values())

    @property
    def num_free(self) -> int:
        """Rows that could be placed at once."""
        return self._num_free(self._board.promising)

    @property
    def num_free_own(self) -> int:
        """Those of them that this cluster's targets would play."""
        return self._num_free(lane for lane in self._board.promising if lane.is_own)

    def _num_free(self, lanes: Iterable[LaneView]) -> int:
        return int(sum(max(0, self._room(lane)) for lane in lanes if not lane.is_pausing))

    def _is_free(self, lane: LaneView) -> bool:
        return not lane.is_pausing and self._room(lane) > 0

    def _num_rows(self, lane: LaneView) -> int:
        return sum([len(window.tickets) for window in self._windows.get(lane.name, ())])

    def _room(self, lane: LaneView) -> float:
        """Rows that fit into a lane's windows that take joins, and into those still to open.

        Rows of windows that run out hold places too: a lane that played more and more windows would give
        each an ever smaller part of its time.
        """
        num_unopened, max_rows = self._windows_of(lane)
        places, free = 0, num_unopened * max_rows
        for window in self._windows.get(lane.name, ()):
            free -= len(window.tickets)
            if window.is_joinable:
                num_unopened -= 1
                places += max(0, max_rows - len(window.tickets))
        return min(places + max(0, num_unopened) * max_rows, free, lane.room)

    def _joinable(self, lane: LaneView) -> BurstWindow | None:
        _, max_rows = self._windows_of(lane)
        for window in self._windows.get(lane.name, ()):
            if window.is_joinable and len(window.tickets) < max_rows:
                return window
        return None

    def _windows_of(self, lane: LaneView) -> tuple[int, int]:
        """How many windows a lane is given, and how many rows each."""
        if lane.standing.favours_two and self._max_windows == 1 and lane.max_rows > 1:
            return 2, -(-lane.max_rows // 2)
        return self._max_windows, lane.max_rows
