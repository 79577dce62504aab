"""How long a target waits for drafts: three times their running median, by shape.

A late answer counts like any other, so a drafter that has become slower for good is soon waited for again.
"""

import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

SLOWER = 3.0  # times the median: later than that is a stall
FLOOR_S = 0.05  # no draft is late before; a machine's other work may take as long
MIN_SAMPLES = 5  # of a shape, before its median says anything: the first may have compiled
COMPILE_S = 0.5  # a shape's first drafts may take so long, whatever those of other shapes took
MAX_SAMPLES = 15  # eight late ones move the median
TOKENS_PER_SECOND = 1000  # a drafter that takes features more slowly than this is as good as none

Shape = tuple[int, int]  # slots, width


class Patience:
    """Running medians of what drafts took. Answers may be observed on any thread."""

    def __init__(self, cap_s: float, floor_s: float = FLOOR_S):
        """``cap_s`` is never exceeded; it is waited while no shape of at least this size is known."""
        self._cap_s = cap_s
        self._floor_s = floor_s
        self._took: defaultdict[Shape, deque[float]] = defaultdict(partial(deque, maxlen=MAX_SAMPLES))
        self._lock = threading.Lock()

    def limit_s(self, shape: Shape, num_tokens: int) -> float:
        """Seconds to wait for drafts of a shape that bring the drafter features of ``num_tokens``.

        What a round brings, a block a row, is part of every sample; more than that has time of its own,
        inside the cap: a drafter with long contexts to build does so while rounds are classic.
        """
        slots, width = shape
        news = max(0, num_tokens - slots * width)
        with self._lock:
            limit = self._shape_limit_s(shape)
        return min(self._cap_s, limit + news / TOKENS_PER_SECOND)

    def _shape_limit_s(self, shape: Shape) -> float:
        """Of the shape's own median or, until it has one, of the slowest that is no smaller."""
        if len(self._took[shape]) >= MIN_SAMPLES:
            return max(SLOWER * statistics.median(self._took[shape]), self._floor_s)
        size = shape[0] * shape[1]
        known = [
            statistics.median(took)
            for (slots, width), took in self._took.items()
            if slots * width >= size and len(took) >= MIN_SAMPLES
        ]
        return max(SLOWER * max(known), COMPILE_S, self._floor_s) if known else self._cap_s

    def observe(self, shape: Shape, num_tokens: int, seconds: float) -> None:
        """An answer came; one that brought a prompt says nothing of others."""
        if num_tokens <= shape[0] * shape[1]:
            with self._lock:
                self._took[shape].append(seconds)

    @contextmanager
    def waived(self, cap_s: float) -> Iterator[None]:
        """Wait so long for every answer, while shapes are played that may have to be compiled."""
        kept = self._cap_s, self._floor_s
        self._cap_s = self._floor_s = cap_s
        try:
            yield
        finally:
            self._cap_s, self._floor_s = kept
