"""``dflash-serve bench``: the same chats under every policy in one process, arms interleaved.

Ratios of one run are the figures to quote; absolutes drift on a shared machine.
"""

import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from deployments.prompts import RowRequest
from dflash_core import blas
from dflash_core.acceptance import Acceptance
from dflash_core.calibration import measure_costs
from dflash_core.errors import InvalidRequest
from dflash_core.loading import LoadedLane
from dflash_core.request import WindowId
from dflash_core.width import AutoWidth, FixedWidth, WidthPolicy
from dflash_core.window import Window, WindowPolicy
from dflash_core.workload import Played, Totals, play_all

# accept and context policy per arm; classic is width 1 under the same loop
ARMS: dict[str, tuple[str, str]] = {
    "classic": ("per_row", "per_row"),
    "clamp_shared": ("clamp", "shared"),
    "clamp": ("clamp", "per_row"),
    "per_row_shared": ("per_row", "shared"),
    "per_row": ("per_row", "per_row"),
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to run."""

    rows: int
    arms: tuple[str, ...] = tuple(ARMS)
    repeat: int = 3
    width: int | None = None  # None: auto


@dataclass(slots=True)
class ArmResult:
    """One arm's figures; counts are equal in every repetition, rates are one per repetition."""

    name: str
    tok_s: list[float] = field(default_factory=list)
    rounds: int = 0
    walked_per_row_round: float = 0.0
    accepted_per_row_round: float = 0.0
    emitted_per_row_round: float = 0.0
    round_ms: dict[str, float] = field(default_factory=dict)
    max_gap_ms: float = 0.0
    widths: dict[int, int] = field(default_factory=dict)
    equal_rows: int = 0  # rows whose token ids equal the first arm's

    def add(self, totals: Totals) -> None:
        """Take one repetition."""
        self.tok_s.append(totals.tokens_per_second)
        self.rounds = totals.rounds
        self.walked_per_row_round = totals.per_row_round(totals.walked)
        self.accepted_per_row_round = totals.per_row_round(totals.accepted)
        self.emitted_per_row_round = totals.per_row_round(totals.tokens)
        self.round_ms = {k: 1e3 * v / max(totals.rounds, 1) for k, v in totals.phases.items()}
        self.max_gap_ms = 1e3 * totals.max_gap_s
        self.widths = dict(totals.widths)

    def line(self, baseline: "ArmResult") -> str:
        """One row of the printed table."""
        low, mid, high = min(self.tok_s), statistics.median(self.tok_s), max(self.tok_s)
        ratio = mid / statistics.median(baseline.tok_s)
        return (
            f"{self.name:16s} {low:7.1f} {mid:7.1f} {high:7.1f}  {ratio:5.2f}x {self.rounds:6d} "
            f"{self.walked_per_row_round:7.2f} {self.accepted_per_row_round:9.2f} {self.max_gap_ms:8.0f}"
        )


HEADER = (
    f"{'arm':16s} {'tok/s: min':>7s} {'med':>4s} {'max':>7s}  {'ratio':>6s} rounds  walked  accepted   gap ms"
)


def run(
    lane: LoadedLane, requests: list[RowRequest], options: BenchOptions, log: Callable[[str], None]
) -> list[ArmResult]:
    """Play every arm ``repeat`` times, interleaved, after a repetition that is not counted.

    Raises InvalidRequest for an arm that does not exist.
    """
    for arm in options.arms:
        if arm not in ARMS:
            raise InvalidRequest(f"unknown arm {arm!r}: one of {', '.join(ARMS)}", param="arms")
    costs = None
    if options.width is None:
        costs = measure_costs(lane.target, lane.drafter, max_rows=options.rows, budget_s=120.0)
        log(
            "measured ms per round: "
            + ", ".join(f"{k} {1e3 * v:.1f}" for k, v in costs.as_json()["rounds"].items())
        )
    results = {arm: ArmResult(arm) for arm in options.arms}
    # As in a server, what earlier windows showed of the drafter is known to the next.
    acceptances = {arm: Acceptance(lane.drafter.block_size) for arm in options.arms}
    reference: Played | None = None
    for repetition in range(options.repeat + 1):
        # Every other time in reverse: what runs second may find the machine warmer, or the caches full.
        for arm, result in list(results.items())[:: -1 if repetition % 2 else 1]:
            if arm == "classic":
                width: WidthPolicy = FixedWidth(1)
            elif costs is None:
                width = FixedWidth(options.width or 1)
            else:
                width = AutoWidth(costs, acceptances[arm])
            accept, context = ARMS[arm]
            policy = WindowPolicy(width=width, max_rows=options.rows, accept=accept, context=context)
            played = play_all(Window(WindowId("bench"), lane.target, lane.drafter, policy), requests)
            reference = reference or played
            if repetition > 0:
                result.add(played.totals)
                result.equal_rows = sum(played.tokens[k] == v for k, v in reference.tokens.items())
                log(f"repetition {repetition}: {arm} {played.totals.tokens_per_second:.1f} tok/s")
    return list(results.values())


def report(results: list[ArmResult], options: BenchOptions, num_prompts: int) -> dict[str, Any]:
    """The JSON that ``--json`` prints."""
    return {
        "machine": machine(),
        "rows": options.rows,
        "width": options.width or "auto",
        "prompts": num_prompts,
        "repeat": options.repeat,
        "arms": [asdict(result) for result in results],
    }


def machine() -> dict[str, str | int | None]:
    """What the figures were measured on."""
    device = mx.default_device()
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": str(device),
        "blas_threads": blas.num_threads(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }
