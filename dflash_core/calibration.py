"""Measuring what rounds cost here, with real rounds of made-up rows; it warms every shape on the way."""

import time
from collections.abc import Sequence
from dataclasses import replace

from dflash_core.costs import PlayRound, RoundCosts, measure, measure_pair
from dflash_core.events import RoundReport
from dflash_core.protocols import Drafter
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.row_cache import row_buckets
from dflash_core.target import Target
from dflash_core.width import WIDTHS
from dflash_core.window import Window, WindowPolicy

_WINDOWS = (WindowId("calibration"), WindowId("calibration-2"))
_PROMPT_TOKENS = 16


class GivenWidth:
    """A width that is set from outside before each round: to measure shapes, or to warm them."""

    def __init__(self) -> None:
        self.width = 1

    def choose(self, row_ids: Sequence[RowId | None], widest: int) -> int:
        """The width that was set."""
        return min(self.width, widest)

    def observe(self, report: RoundReport) -> None:
        """Nothing to learn."""

    def forget(self, row_id: RowId) -> None:
        """Nothing to forget."""


def measure_costs(
    target: Target, drafter: Drafter, *, max_rows: int, budget_s: float, known: RoundCosts | None = None
) -> RoundCosts:
    """Time rounds at every row bucket up to ``max_rows`` and every width of the drafter's block.

    On the MLX thread. Stops after ``budget_s`` seconds, compilation included; what is missing then is
    interpolated. Few rows and wide blocks come first; what is ``known`` is not timed again. Last, the
    most rows at the full block are timed once more as two windows that alternate.
    """
    began = time.perf_counter()
    buckets = row_buckets(max_rows)
    widths = [width for width in WIDTHS if width <= drafter.block_size]
    policy_width = GivenWidth()
    windows: dict[int, Window] = {}

    def open_round(slots: int, width: int) -> PlayRound:
        if slots not in windows:
            for window in windows.values():
                window.close()
            windows.clear()
            windows[slots] = _window_of(target, drafter, policy_width, slots)
        policy_width.width = width
        return lambda: _play(windows[slots])

    try:
        costs = measure(open_round, buckets, widths, budget_s=budget_s, known=known)
    finally:
        for window in windows.values():
            window.close()
    shape = (buckets[-1], widths[-1])
    if shape in costs.paired or shape[0] < 2 or time.perf_counter() - began > budget_s:
        return costs
    return replace(costs, paired={**costs.paired, shape: _pair_seconds(target, drafter, *shape)})


def _pair_seconds(target: Target, drafter: Drafter, slots: int, width: int) -> float:
    """One round of ``slots`` rows in two windows, each asking for drafts before the other verifies."""
    given = GivenWidth()
    windows = [_window_of(target, drafter, given, slots // 2, window_id) for window_id in _WINDOWS]
    given.width = width

    def play_both() -> None:
        for window in windows:
            window.step()
            window.begin()

    try:
        return measure_pair(play_both)
    finally:
        for window in windows:
            window.close()


def _window_of(
    target: Target, drafter: Drafter, width: GivenWidth, num_rows: int, window_id: WindowId = _WINDOWS[0]
) -> Window:
    window = Window(window_id, target, drafter, WindowPolicy(width=width, max_rows=num_rows))
    budget = min(2048, target.max_context - _PROMPT_TOKENS)
    for i in range(num_rows):
        # Different rows, so that no shortcut of equal inputs is measured.
        tokens = tuple((7 * i + 13 * j) % target.vocab_size for j in range(1, _PROMPT_TOKENS + 1))
        window.admit(RowRequest(RowId(f"calibration-{i}"), tokens, budget))
    while window.num_live < num_rows and window.has_work:
        window.step()
    return window


def _play(window: Window) -> None:
    window.step()
