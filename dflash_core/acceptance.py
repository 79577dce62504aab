"""Running estimates of how far drafts are walked, per row and block position.

``P(walk i | walked i - 1)`` is estimated with censoring: a round of width K says nothing about
positions beyond K - 1 or behind its first mismatch. A row leans on the prior that all rows of the
drafter share until it has seen enough itself. The prior is what rows begin with, so it learns from their
beginnings alone: one long answer that the drafter cannot follow says nothing of the next ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId

_MEMORY = 0.9  # weight that a row's past keeps per round: text changes character quickly
_PRIOR_MEMORY = 0.998  # the same of the prior
_BEGINNING = 16  # drafted rounds of a row that the prior learns from
_PRIOR_WEIGHT = 0.4  # rounds' worth of evidence that the prior counts as in a row's estimate
# Every step's probability before anything was seen, and what that counts as. What is not seen again for long
# returns to it: a place behind the blocks that are drafted now must not stay hopeless for ever.
_OPTIMISM, _OPTIMISM_WEIGHT = 0.7, 4.0


@dataclass(slots=True)
class _Counts:
    trials: np.ndarray  # [K - 1] rounds that reached position i
    walks: np.ndarray  # [K - 1] of them, those whose draft matched
    num_rounds: int = 0

    @staticmethod
    def none(size: int) -> "_Counts":
        return _Counts(np.zeros(size), np.zeros(size))

    def fade(self, memory: float) -> None:
        self.trials *= memory
        self.walks *= memory

    def add(self, walked: int, reached: int) -> None:
        self.trials[:reached] += 1
        self.walks[:walked] += 1
        self.num_rounds += 1


@dataclass(slots=True)
class Acceptance:
    """Estimates for the rows of one window, over a prior that outlives them."""

    block_size: int
    _prior: _Counts = field(init=False)
    _rows: dict[RowId, _Counts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = max(self.block_size - 1, 1)
        self._prior = _Counts.none(size)

    def expected(self, row_ids: Sequence[RowId], width: int) -> float:
        """Tokens that a round of this width is expected to commit, all rows together."""
        return sum(float(self._reach(row_id)[: width - 1].sum()) + 1.0 for row_id in row_ids)

    def observe(self, report: RoundReport) -> None:
        """Learn from a round; rows that ended are forgotten."""
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
            counts = self._rows[progress.row_id] = _Counts.none(len(self._prior.trials))
        counts.fade(_MEMORY)
        counts.add(walked, reached)
        if counts.num_rounds <= _BEGINNING:
            self._prior.fade(_PRIOR_MEMORY)
            self._prior.add(walked, reached)

    def _reach(self, row_id: RowId) -> np.ndarray:
        """Probability that position i is walked, [K - 1]."""
        seen = self._prior
        prior = (seen.walks + _OPTIMISM_WEIGHT * _OPTIMISM) / (seen.trials + _OPTIMISM_WEIGHT)
        counts = self._rows.get(row_id)
        if counts is None:
            return np.cumprod(prior)
        steps = (counts.walks + _PRIOR_WEIGHT * prior) / (counts.trials + _PRIOR_WEIGHT)
        return np.cumprod(steps)
