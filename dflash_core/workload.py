"""A whole set of requests played to its end on one lane, in this process: for parity, benchmarks, tests."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest
from dflash_core.window import Window


@dataclass(slots=True)
class Totals:
    """Sums over the rounds of a workload; row-rounds count live rows of rounds."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    walked: int = 0
    accepted: int = 0
    max_rows: int = 0
    max_gap_s: float = 0.0  # longest step while rows were live
    phases: Counter[str] = field(default_factory=Counter[str])
    widths: Counter[int] = field(default_factory=Counter[int])

    def add(self, report: RoundReport, step_seconds: float) -> None:
        """Count one step."""
        self.tokens += sum(len(row.tokens) for row in report.rows)
        self.phases.update(report.seconds)
        if report.width == 0:
            return
        self.rounds += 1
        self.widths[report.width] += 1
        self.row_rounds += report.live_rows
        self.drafted += sum(row.drafted for row in report.rows)
        self.walked += sum(row.walked for row in report.rows)
        self.accepted += sum(row.accepted for row in report.rows)
        self.max_rows = max(self.max_rows, report.live_rows)
        self.max_gap_s = max(self.max_gap_s, step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole workload, prefill included."""
        return self.tokens / self.seconds

    def per_row_round(self, count: int) -> float:
        """A count per row-round."""
        return count / max(self.row_rounds, 1)


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a workload."""

    tokens: dict[RowId, tuple[int, ...]]  # emitted, by row
    errors: dict[RowId, str]
    totals: Totals


def play_all(
    window: Window, requests: Sequence[RowRequest], *, on_report: Callable[[RoundReport], None] | None = None
) -> Played:
    """Admit all requests at once and step until none is left. Closes the window."""
    emitted: dict[RowId, list[int]] = {request.row_id: [] for request in requests}
    errors: dict[RowId, str] = {}
    totals = Totals()
    began = time.perf_counter()
    for request in requests:
        window.admit(request)
    while window.has_work:
        step_began = time.perf_counter()
        report = window.step()
        totals.add(report, time.perf_counter() - step_began)
        for row in report.rows:
            emitted[row.row_id] += row.tokens
            if row.error is not None:
                errors[row.row_id] = row.error
        if on_report is not None:
            on_report(report)
    totals.seconds = time.perf_counter() - began
    window.close()
    return Played({row_id: tuple(tokens) for row_id, tokens in emitted.items()}, errors, totals)
