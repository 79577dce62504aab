"""``dflash-serve parity``: rows in one window against the same rows alone, with controls that must hold.

Exit code 0 only if every row passes, every control behaves and the run was not empty.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from dflash_core.loading import LoadedLane
from dflash_core.models.target import BlockJournal, CacheArrays, TargetNetwork
from dflash_core.parity import DEFAULT_MARGIN, Comparison, compare, next_logits
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.target import Target
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from dflash_core.workload import Played, play_all


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """What to compare."""

    rows: int
    width: int
    margin: float = DEFAULT_MARGIN


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    name: str
    is_good: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Rows played together, beside what each said alone."""

    requests: Sequence[RowRequest]
    alone: Mapping[RowId, Sequence[int]]
    together: Played
    comparisons: list[Comparison]
    options: ParityOptions

    @property
    def differing(self) -> list[Comparison]:
        """The rows that are not equal."""
        return [comparison for comparison in self.comparisons if comparison.verdict != "equal"]


def run(lane: LoadedLane, requests: list[RowRequest], options: ParityOptions) -> list[Check]:
    """Compare and try the controls; the gate passes if every check is good."""
    trial = attempt(lane, requests, say_alone(lane, requests), options)
    return [*judge(trial), *control(lane, trial)]


def say_alone(lane: LoadedLane, requests: Sequence[RowRequest]) -> Mapping[RowId, tuple[int, ...]]:
    """The reference: one row, one token at a time."""
    return play(lane.target, lane, requests, rows=1, width=1).tokens


def attempt(
    lane: LoadedLane,
    requests: Sequence[RowRequest],
    alone: Mapping[RowId, Sequence[int]],
    options: ParityOptions,
) -> Trial:
    """Play the requests together and compare each with itself alone."""
    together = play(lane.target, lane, requests, rows=options.rows, width=options.width)
    comparisons = _compare_all(lane.target, requests, alone, together, options.margin)
    return Trial(requests, alone, together, comparisons, options)


def judge(trial: Trial) -> list[Check]:
    """Whether every row passes, and whether there was anything to pass."""
    options, together, totals = trial.options, trial.together, trial.together.totals
    gaps = ", ".join(f"{c.row_id}@{c.position}: {c.gap:.3g}" for c in trial.differing) or "none"
    return [
        Check("rows", all(c.passes(options.margin) for c in trial.comparisons), f"differences: {gaps}"),
        Check(
            "run was real",
            min(map(len, together.tokens.values())) > 0
            and totals.rounds > 0
            and (options.width == 1 or totals.accepted > 0)
            and totals.max_rows == min(options.rows, len(trial.requests)),
            f"{totals.tokens} tokens, {totals.rounds} rounds, {totals.accepted} accepted, "
            f"up to {totals.max_rows} rows in one window",
        ),
    ]


def control(lane: LoadedLane, trial: Trial) -> list[Check]:
    """What must be rejected is, and what must pass does."""
    return [
        _margin_removed(lane.target, trial),
        _identical_prompts(lane, trial.requests[0], trial.options),
        _broken_commit(lane, trial),
    ]


def play(
    target: Target, lane: LoadedLane, requests: Sequence[RowRequest], *, rows: int, width: int
) -> Played:
    """Play requests at a fixed width."""
    policy = WindowPolicy(width=FixedWidth(width), max_rows=rows)
    return play_all(Window(WindowId("parity"), target, lane.drafter, policy), requests)


def _compare_all(
    target: Target,
    requests: Sequence[RowRequest],
    alone: Mapping[RowId, Sequence[int]],
    together: Played,
    margin: float,
) -> list[Comparison]:
    return [compare(target, r, alone[r.row_id], together.tokens[r.row_id], margin=margin) for r in requests]


def _margin_removed(target: Target, trial: Trial) -> Check:
    """At margin 0 every observed difference is rejected; where none was observed, one is injected."""
    differing = trial.differing
    if differing:
        rejected = [not c.passes(0.0) for c in differing]
        return Check("margin 0 rejects", all(rejected), f"{sum(rejected)} of {len(rejected)} observed")
    request = trial.requests[0]
    reference = trial.alone[request.row_id]
    logits = next_logits(target, request.tokens)
    logits[reference[0]] = -float("inf")
    altered = (int(logits.argmax()), *reference[1:])
    verdict = compare(target, request, reference, altered, margin=0.0)
    return Check("margin 0 rejects", not verdict.passes(0.0), f"1 injected, gap {verdict.gap:.3g}")


def _identical_prompts(lane: LoadedLane, request: RowRequest, options: ParityOptions) -> Check:
    """Copies of one request in one window all emit what it emits alone."""
    copies = [replace(request, row_id=RowId(f"copy-{i}")) for i in range(options.rows)]
    alone = play(lane.target, lane, copies[:1], rows=1, width=options.width).tokens[copies[0].row_id]
    together = play(lane.target, lane, copies, rows=options.rows, width=options.width)
    results = [
        compare(lane.target, c, alone, together.tokens[c.row_id], margin=options.margin) for c in copies
    ]
    passed = sum(c.passes(options.margin) for c in results)
    return Check("identical prompts", passed == len(copies), f"{passed} of {len(copies)} rows pass")


def _broken_commit(lane: LoadedLane, trial: Trial) -> Check:
    """A commit that is off by one accept on one slot must fail the gate."""
    options = trial.options
    if options.width == 1:
        return Check("broken commit fails", True, "not applicable: nothing is accepted at width 1")
    broken = lane.target.with_network(lambda network: OffByOne(network))
    played = play(broken, lane, trial.requests, rows=options.rows, width=options.width)
    comparisons = _compare_all(lane.target, trial.requests, trial.alone, played, options.margin)
    failed = sum(not c.passes(options.margin) for c in comparisons)
    return Check("broken commit fails", failed > 0, f"{failed} of {len(trial.requests)} rows rejected")


class OffByOne(TargetNetwork):
    """A network whose commit loses one accepted input of slot 0: the control's deliberate fault."""

    def __init__(self, network: TargetNetwork):
        self.__dict__.update(network.__dict__)

    def commit(self, journal: BlockJournal, caches: CacheArrays, counts: mx.array) -> CacheArrays:
        """Commit one input less than told on slot 0, where more than one is to be kept."""
        is_first = mx.arange(counts.shape[0]) == 0
        return super().commit(journal, caches, mx.where(is_first & (counts > 1), counts - 1, counts))


def show(checks: Sequence[Check], log: Callable[[str], None]) -> bool:
    """Print the verdict; returns whether the gate passes."""
    for check in checks:
        log(f"{'pass' if check.is_good else 'FAIL'}  {check.name}: {check.detail}")
    return all(check.is_good for check in checks)
