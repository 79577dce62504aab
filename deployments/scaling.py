"""How many targets there should be. Serve decides, by what targets publish.

One streaming call carries a whole window, so Serve's own count of ongoing requests says little: a lane with
one row looks like one with sixteen, and what routers have queued is not to be seen at all. So every target
publishes the rows that it plays, and what each router told it of its queue.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

ROWS = "dflash_rows"
WAITING = "dflash_waiting"
FORGOTTEN_AFTER_S = 5.0  # a router that has said nothing for so long is gone
FULLNESS = 0.75  # rows of a window that a lane should have; the rest is for bursts


class Demand:
    """What routers have no place for, as one target heard it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waiting: dict[str, tuple[int, float]] = {}

    def hear(self, router: str, num_waiting: int) -> None:
        """A router has so many requests waiting."""
        self._waiting[router] = (num_waiting, self._clock())

    def figures(self, num_rows: int) -> dict[str, float]:
        """What Serve is told, with the rows that this target plays."""
        oldest = self._clock() - FORGOTTEN_AFTER_S
        self._waiting = {router: told for router, told in self._waiting.items() if told[1] >= oldest}
        return {ROWS: float(num_rows), WAITING: float(sum(count for count, _ in self._waiting.values()))}


def by_rows(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many targets as rows and queue need, with ``target_ongoing_requests`` rows on each.

    Serve bounds and delays what comes out. Every router tells every target of its queue, so the queue is
    counted once: as the target has it that heard the most.
    """
    told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    rows = sum(told.get(ROWS, {}).values())
    waiting = max(told.get(WAITING, {}).values(), default=0.0)
    if not told.get(ROWS):  # nobody has said anything yet
        return context.target_num_replicas, {}
    each = context.config.target_ongoing_requests  # type: ignore[union-attr]
    return math.ceil((rows + waiting) / each), {}
