"""Running estimates of how far drafts are walked, per row and block position.

``P(walk i | walked i - 1)`` is estimated with censoring: a round of width K says nothing about
positions beyond K - 1 or behind its first mismatch. A row leans on the prior that all rows of the
drafter share until it has seen enough itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId

_MEMORY = 0.9  # weight that a row's past keeps per round: text changes character quickly
_PRIOR_MEMORY = 0.998
_PRIOR_WEIGHT = 0.4  # rounds' worth of evidence that the prior counts as in a row's estimate
_OPTIMISM = 0.7  # every step's probability before anything was seen


@dataclass(slots=True)
class _Counts:
    trials: np.ndarray  # [K - 1] rounds that reached position i
    walks: np.ndarray  # [K - 1] of them, those whose draft matched

    def fade(self, memory: float) -> None:
        self.trials *= memory
        self.walks *= memory

    def add(self, walked: int, reached: int) -> None:
        self.trials[:reached] += 1
        self.walks[:walked] += 1


@dataclass(slots=True)
class Acceptance:
    """Estimates for the rows of one window, over a prior that outlives them."""

    block_size: int
    _prior: _Counts = field(init=False)
    _rows: dict[RowId, _Counts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = max(self.block_size - 1, 1)
        self._prior = _Counts(np.full(size, 4.0), np.full(size, 4.0 * _OPTIMISM))

    def expected(self, row_ids: Sequence[RowId], width: int) -> float:
        """Tokens that a round of this width is expected to commit, all rows together."""
        return sum(float(self._reach(row_id)[: width - 1].sum()) + 1.0 for row_id in row_ids)

    def observe(self, report: RoundReport) -> None:
        """Learn from a round; rows that ended are forgotten."""
        self._prior.fade(_PRIOR_MEMORY)
        for progress in report.rows:
            if progress.drafted > 0:
                self._observe_row(progress)
            if progress.finish is not None:
                self._rows.pop(progress.row_id, None)

    def forget(self, row_id: RowId) -> None:
        """A row left without finishing."""
        self._rows.pop(row_id, None)

    def _observe_row(self, progress: RowProgress) -> None:
        # What lies behind a stop token was never meant: a row that ends shows no mismatch there.
        ended = progress.finish is not None
        walked = min(progress.walked, progress.accepted) if ended else progress.walked
        reached = walked if ended else min(walked + 1, progress.drafted)
        counts = self._rows.get(progress.row_id)
        if counts is None:
            size = len(self._prior.trials)
            counts = self._rows[progress.row_id] = _Counts(np.zeros(size), np.zeros(size))
        counts.fade(_MEMORY)
        counts.add(walked, reached)
        self._prior.add(walked, reached)

    def _reach(self, row_id: RowId) -> np.ndarray:
        """Probability that position i is walked, [K - 1]."""
        prior = self._prior.walks / self._prior.trials
        counts = self._rows.get(row_id)
        if counts is None:
            return np.cumprod(prior)
        steps = (counts.walks + _PRIOR_WEIGHT * prior) / (counts.trials + _PRIOR_WEIGHT)
        return np.cumprod(steps)
