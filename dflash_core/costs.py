"""What a round costs, by slots and width: measured at start, drafting and exchange included."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_core.row_cache import bucket_rows

Shape = tuple[int, int]  # (slots, width)
_CLEARLY = 0.95  # of what one window takes: below it two are worth their trouble


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds per round for measured (slots, width) pairs; others are read off their neighbours."""

    table: dict[Shape, float]
    # A round of two windows with half the slots each, one drafting while the other verifies.
    paired: dict[Shape, float] = field(default_factory=dict)

    def seconds(self, num_slots: int, width: int) -> float:
        """Seconds of a round of ``num_slots`` rows at ``width``.

        A wider round of as many rows holds all the work of this one, so where it took less, this one was
        disturbed when it was timed.
        """
        slots = bucket_rows(num_slots)
        exact = self.table.get((slots, width))
        if exact is not None:
            return min(exact, *(v for (s, w), v in self.table.items() if s == slots and w >= width))
        # The nearest measured pair in tokens, scaled by half the ratio: a round has a fixed part.
        size = slots * width
        pair = min(self.table, key=lambda p: (abs(math.log(p[0] * p[1] / size)), abs(p[1] - width)))
        ratio = size / (pair[0] * pair[1])
        return self.table[pair] * (0.5 + 0.5 * ratio)

    @property
    def favours_two_windows(self) -> bool:
        """Whether the same rows in two alternating windows clearly take less time than in one."""
        return any(pair < _CLEARLY * self.seconds(*shape) for shape, pair in self.paired.items())

    def as_json(self) -> dict[str, dict[str, float]]:
        """Both tables with ``"slots x width"`` keys."""
        return {"rounds": _as_json(self.table), "paired": _as_json(self.paired)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "RoundCosts":
        """Read what ``as_json`` wrote. Raises ValueError, KeyError or the like if it is something else."""
        table = _from_json(data["rounds"])
        if not table:
            raise ValueError("an empty table of costs")
        return RoundCosts(table, _from_json(data["paired"]))


def _as_json(table: dict[Shape, float]) -> dict[str, float]:
    return {f"{slots}x{width}": seconds for (slots, width), seconds in sorted(table.items())}


def _from_json(data: dict[str, Any]) -> dict[Shape, float]:
    table: dict[Shape, float] = {}
    for key, seconds in data.items():
        slots, width = key.split("x")
        table[int(slots), int(width)] = float(seconds)
    return table


PlayRound = Callable[[], None]


def measure(
    open_round: Callable[[int, int], PlayRound],
    row_buckets: Sequence[int],
    widths: Iterable[int],
    *,
    budget_s: float,
    repeat: int = 5,
    known: RoundCosts | None = None,
) -> RoundCosts:
    """Time rounds of each pair, widest first; pairs beyond ``budget_s`` are left to interpolation.

    Pairs ``known`` from an earlier measurement are not timed again.

    ``open_round(slots, width)`` returns a function that plays one such round to its end. The first
    call of each is not counted: it compiles.
    """
    began = time.perf_counter()
    known = known or RoundCosts({})
    table = dict(known.table)
    for slots in row_buckets:
        timed: dict[int, list[float]] = {}
        for width in sorted(widths, reverse=True):
            if (slots, width) in table:
                continue
            if (table or timed) and time.perf_counter() - began > budget_s:
                break
            open_round(slots, width)()
            timed[width] = []
        for _ in range(repeat):  # in turn, so that a moment's load does not fall on one width alone
            for width, samples in timed.items():
                samples.append(_time(open_round(slots, width)))
        table.update({(slots, width): min(samples) for width, samples in timed.items()})  # noise only adds
    return RoundCosts(table, known.paired)


def measure_pair(play_both: PlayRound, *, repeat: int = 5) -> float:
    """Seconds of one round of two windows that alternate; the first is not counted."""
    play_both()
    return min(_time(play_both) for _ in range(repeat))


def _time(play: PlayRound) -> float:
    began = time.perf_counter()
    play()
    return time.perf_counter() - began
