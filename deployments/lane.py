"""The windows of one target replica, on its MLX thread: apply mail, play a round of each, post the report."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from deployments.lanes import NEWEST, Standing
from deployments.messages import Admit, Answer, Closed, LastCall, Letter, Played, Retire, Traffic
from dflash_core.errors import DFlashError
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, RowRequest, WindowId

logger = logging.getLogger("dflash.target")

Post = Callable[[Answer], None]  # called on the MLX thread


class PlayableWindow(Protocol):
    """The part of ``dflash_core.window.Window`` that a lane uses."""

    @property
    def has_work(self) -> bool:
        """Whether any row is live, prefilling or waiting."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows live, prefilling or waiting."""
        ...

    def admit(self, request: RowRequest) -> None:
        """A row joins."""
        ...

    def retire(self, row_id: RowId) -> None:
        """A row leaves before the next round."""
        ...

    def begin(self) -> None:
        """Ask for the drafts of the next step; joins and leaves then take effect after it."""
        ...

    def step(self) -> RoundReport:
        """At most one prefill chunk, then one round; the rest of it if it has begun."""
        ...

    def close(self) -> None:
        """Free all state."""
        ...


@dataclass
class _Open:
    window: PlayableWindow
    post: Post
    acknowledged: int = 0
    is_last_call: bool = False


class Lane:
    """Plays up to ``max_windows`` windows that take joins. Every method runs on the MLX thread."""

    def __init__(
        self,
        open_window: Callable[[WindowId], PlayableWindow],
        max_windows: int,
        take_traffic: Callable[[], Traffic | None] = lambda: None,
        *,
        max_rows: int | None = None,
        favours_two: bool = False,
    ):
        self.max_rows = max_rows  # of a window, where it is less than the settings say
        self.favours_two = favours_two  # windows that alternate, over one of all rows
        self._open_window = open_window
        self._max_windows = max_windows
        self._take_traffic = take_traffic
        self._windows: dict[WindowId, _Open] = {}
        self._round_s = 0.0
        self._note()

    @property
    def num_windows(self) -> int:
        """Windows open now."""
        return len(self._windows)

    @property
    def num_rows(self) -> int:
        """Rows of all windows."""
        return sum(entry.window.num_rows for entry in self._windows.values())

    def is_open(self, window_id: WindowId) -> bool:
        """Whether a window is played here."""
        return window_id in self._windows

    def open(self, window_id: WindowId, letters: Iterable[Letter], post: Post) -> bool:
        """Open a window with its first letters; False if the lane is full.

        Windows that run out do not count, or two of them could bar every new request for minutes.
        """
        joinable = sum(not entry.is_last_call for entry in self._windows.values())
        if joinable >= self._max_windows or window_id in self._windows:
            return False
        self._windows[window_id] = _Open(self._open_window(window_id), post)
        self.apply(window_id, letters)
        self._note()
        return True

    def apply(self, window_id: WindowId, letters: Iterable[Letter]) -> None:
        """Let rows join and leave; takes effect before the next round. A closed window's mail is void."""
        entry = self._windows.get(window_id)
        if entry is None:
            return
        for letter in letters:
            entry.acknowledged = letter.number
            match letter.command:
                case Admit(request):
                    self._admit(window_id, entry, request)
                case Retire(row_id):
                    entry.window.retire(row_id)
                case LastCall():
                    entry.is_last_call = True

    def close(self, window_id: WindowId) -> None:
        """The reader is gone: free the window's state."""
        entry = self._windows.pop(window_id, None)
        if entry is not None:
            entry.window.close()
            self._note()

    def end(self, window_id: WindowId, reason: Closed) -> None:
        """End a window and say so."""
        entry = self._windows.get(window_id)
        if entry is not None:
            self.close(window_id)
            entry.post(reason)

    def step(self) -> bool:
        """One round of each window that has rows; says whether there is more to play.

        Of several windows, each asks for its next drafts before another verifies, so that the drafter
        drafts for one while the target is busy with the other.
        """
        for window_id, entry in list(self._windows.items()):
            if entry.window.has_work:
                self._play(window_id, entry)
            if entry.is_last_call and not entry.window.has_work:
                self.end(window_id, Closed())
        self._note()
        return any(entry.window.has_work for entry in self._windows.values())

    def _admit(self, window_id: WindowId, entry: _Open, request: RowRequest) -> None:
        """A row that the window cannot take ends with its own error, and nobody else is disturbed."""
        try:
            entry.window.admit(request)
        except DFlashError as error:
            failed = RowProgress(request.row_id, (), 0, 0, 0, "error", str(error), error.kind)
            report = RoundReport(window_id, 0, 0, (failed,), 0, 0)
            entry.post(Played(report, entry.acknowledged))

    def _play(self, window_id: WindowId, entry: _Open) -> None:
        try:
            report = entry.window.step()
            if report.live_rows > 0:
                newest = sum(report.seconds.values())
                self._round_s += (newest - self._round_s) * (NEWEST if self._round_s else 1.0)
            entry.post(Played(report, entry.acknowledged, self._take_traffic()))
            if entry.window.has_work and self._have_others_work(window_id):
                entry.window.begin()
        except Exception as error:  # the window is of no use any more; its rows open elsewhere
            logger.exception("window %s failed", window_id, extra={"window": window_id})
            self.end(window_id, Closed("failed", f"{type(error).__name__}: {error}"))

    def _have_others_work(self, window_id: WindowId) -> bool:
        return any(other != window_id and entry.window.has_work for other, entry in self._windows.items())

    def _note(self) -> None:
        """The standing is for other threads to read: never changed, only replaced."""
        self.standing = Standing(
            "", self.num_rows, self.max_rows, self._round_s, favours_two=self.favours_two
        )
