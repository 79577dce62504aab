"""Where the next row goes: the lane with room and the least expected wait, there the first such window.

Where two windows that alternate are faster than one, the rows of one are shared between two.
"""

from collections.abc import Collection, Iterable

from deployments.burst import BurstWindow
from deployments.lanes import Board, LaneView


class Places:
    """Free places at one moment, from one pass over a router's windows. ``max_windows`` is for each lane."""

    def __init__(self, board: Board, windows: Iterable[BurstWindow], max_windows: int):
        self._board = board
        self._max_windows = max_windows
        self._windows: dict[str, list[BurstWindow]] = {}
        for window in windows:
            self._windows.setdefault(window.lane, []).append(window)

    def best(self, but: Collection[str] = ()) -> tuple[LaneView, BurstWindow | None] | None:
        """A lane and its window to join, None where one has to be opened; None if there is no room at all.

        Of lanes that promise the same, the one with the fewest rows of ours; none of those named ``but``.
        """
        best: LaneView | None = None
        least: tuple[float, int] = (0.0, 0)
        for lane in self._board:
            if lane.is_pausing or lane.name in but or self._room(lane) <= 0:
                continue
            num_rows = sum([len(window.tickets) for window in self._windows.get(lane.name, ())])
            rank = (lane.expected_wait_s(num_rows), num_rows)
            if best is None or rank < least:
                best, least = lane, rank
        return None if best is None else (best, self._joinable(best))

    @property
    def num_free(self) -> int:
        """Rows that could be placed at once."""
        return self._num_free(self._board)

    @property
    def num_free_own(self) -> int:
        """Those of them that this cluster's targets would play."""
        return self._num_free(lane for lane in self._board if lane.is_own)

    def _num_free(self, lanes: Iterable[LaneView]) -> int:
        return int(sum(max(0, self._room(lane)) for lane in lanes if not lane.is_pausing))

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
