"""How wide the next block is: anchor + drafts. Chosen per round, for all rows of a window."""

from collections.abc import Sequence
from typing import Protocol

from dflash_core.acceptance import Acceptance
from dflash_core.costs import RoundCosts
from dflash_core.events import ROUND_PHASES, RoundReport
from dflash_core.request import RowId
from dflash_core.shapes import AnyShape, ShapePolicy

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # few shapes, few graphs
_PACE_GAIN = 0.1  # weight of the newest classic round in the running pace


def widths_up_to(widest: int) -> list[int]:
    """The widths below ``widest``, and ``widest`` itself."""
    return [*(width for width in WIDTHS if width < widest), widest]


class WidthPolicy(Protocol):
    """Chooses a width per round and learns from what came of it."""

    def choose(self, row_ids: Sequence[RowId | None], widest: int) -> int:
        """Width of the next round for the rows in these slots, at most ``widest``; 1 is classic."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Learn from a finished round."""
        ...

    def forget(self, row_id: RowId) -> None:
        """A row left without finishing."""
        ...


class FixedWidth:
    """The same width every round, cut to the widest that has a use and that ``shapes`` allows."""

    def __init__(self, width: int, shapes: ShapePolicy | None = None):
        self._width = width
        self._shapes = shapes or AnyShape()

    def choose(self, row_ids: Sequence[RowId | None], widest: int) -> int:
        """The fixed width."""
        return self._shapes.widest(len(row_ids), min(self._width, widest))

    def observe(self, report: RoundReport) -> None:
        """Nothing to learn."""

    def forget(self, row_id: RowId) -> None:
        """Nothing to forget."""


class AutoWidth:
    """The width with the best expected tokens per second, from measured costs and running acceptance.

    Where width 1 wins nothing is learnt about drafts, so a wider round is tried again after a growing
    number of classic rounds, as long as all trials together cost less than ``trial_budget`` of the time.
    What a trial cost is what it took: the drafter must first catch up on the context of every row.
    """

    def __init__(
        self,
        costs: RoundCosts,
        acceptance: Acceptance,
        shapes: ShapePolicy | None = None,
        *,
        trial_budget: float = 0.02,
    ):
        self._costs, self._acceptance = costs, acceptance
        self._shapes = shapes or AnyShape()
        self._trial_budget = trial_budget
        self._classic_rounds = 0  # since the last wider round
        self._patience = 4  # classic rounds before the next trial
        self._classic_seconds = 0.0
        self._trial_seconds = 0.0  # beyond what classic rounds would have taken
        self._pace = 1.0  # what classic rounds take now, against what they took when costs were measured
        self._is_trial = False
        self._num_slots = 1

    def choose(self, row_ids: Sequence[RowId | None], widest: int) -> int:
        """The width with the best expected rate."""
        live = [row_id for row_id in row_ids if row_id is not None]
        slots = len(row_ids)
        widths = [width for width in WIDTHS if width <= widest and self._shapes.allows(slots, width)]
        rates = {w: self._acceptance.expected(live, w) / self._costs.seconds(slots, w) for w in widths}
        best = max(widths, key=lambda w: rates[w])
        self._num_slots, self._is_trial = slots, False
        if best > 1 or len(widths) == 1:
            return best
        trial = max(widths[1:], key=lambda w: rates[w])
        extra = self._pace * (self._costs.seconds(slots, trial) - self._costs.seconds(slots, 1))
        affordable = self._trial_seconds + extra <= self._trial_budget * self._classic_seconds
        self._is_trial = self._classic_rounds >= self._patience and affordable
        return trial if self._is_trial else 1

    def observe(self, report: RoundReport) -> None:
        """Update each row's acceptance; space trials out while they fail."""
        if report.width == 0:
            return
        self._acceptance.observe(report)
        classic = self._costs.seconds(self._num_slots, 1)
        taken = sum(report.seconds.get(phase, 0.0) for phase in ROUND_PHASES)
        if report.width == 1:
            taken = taken or self._pace * classic
            self._pace += _PACE_GAIN * (taken / classic - self._pace)
            self._classic_seconds += taken
            self._classic_rounds += 1
            return
        if self._is_trial:
            taken = taken or self._pace * self._costs.seconds(self._num_slots, report.width)
            self._trial_seconds += max(0.0, taken - self._pace * classic)
        self._classic_rounds = 0
        self._patience = min(2 * self._patience, 512) if self._is_trial else 4

    def forget(self, row_id: RowId) -> None:
        """A row left without finishing."""
        self._acceptance.forget(row_id)
