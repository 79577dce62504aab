"""What a round costs, by slots and width: measured at start, drafting and exchange included."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash_core.row_cache import bucket_rows


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds per round for measured (slots, width) pairs; others are read off their neighbours."""

    table: dict[tuple[int, int], float]

    def seconds(self, num_slots: int, width: int) -> float:
        """Seconds of a round of ``num_slots`` rows at ``width``."""
        slots = bucket_rows(num_slots)
        exact = self.table.get((slots, width))
        if exact is not None:
            return exact
        # The nearest measured pair in tokens, scaled by half the ratio: a round has a fixed part.
        size = slots * width
        pair = min(self.table, key=lambda p: (abs(math.log(p[0] * p[1] / size)), abs(p[1] - width)))
        ratio = size / (pair[0] * pair[1])
        return self.table[pair] * (0.5 + 0.5 * ratio)

    def as_json(self) -> dict[str, float]:
        """The table with ``"slots x width"`` keys."""
        return {f"{slots}x{width}": seconds for (slots, width), seconds in sorted(self.table.items())}

    @staticmethod
    def from_json(data: dict[str, float]) -> "RoundCosts":
        """Read what ``as_json`` wrote. Raises ValueError if it is something else."""
        table: dict[tuple[int, int], float] = {}
        for key, seconds in data.items():
            slots, width = key.split("x")
            table[int(slots), int(width)] = float(seconds)
        if not table:
            raise ValueError("an empty table of costs")
        return RoundCosts(table)


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
    table: dict[tuple[int, int], float] = dict(known.table) if known is not None else {}
    for slots in row_buckets:
        for width in sorted(widths, reverse=True):
            if (slots, width) in table:
                continue
            if table and time.perf_counter() - began > budget_s:
                return RoundCosts(table)
            play = open_round(slots, width)
            play()
            samples: list[float] = []
            for _ in range(repeat):
                start = time.perf_counter()
                play()
                samples.append(time.perf_counter() - start)
            table[slots, width] = min(samples)  # noise only ever adds
    return RoundCosts(table)
