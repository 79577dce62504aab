"""Resident memory of each serving process over time, and its slope."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from tests.faults.application import Application

PERIOD_S = 5.0
SETTLED_S = 480.0  # a young process still fills its caches
LONG_S = 600.0  # a slope over less says more of single steps than of a leak
MOST_MIB_PER_HOUR = 32.0
STEPS_MIB = 12.0  # beside that: allocators grow in steps, ever more seldom

Sizes = list[tuple[float, float]]  # when, MiB


class MemoryWatch:
    """Looks at every process of an application now and then.

    While processes are killed few live long enough to tell anything; those that are there once it is calm
    are judged, all of them.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, Sizes] = defaultdict(list)
        self._calm_at = float("inf")
        self._last = 0.0

    async def watch(self, app: Application, is_over: Callable[[], bool]) -> None:
        """Look until it is over."""
        while not is_over():
            self.note(time.monotonic(), await asyncio.to_thread(app.memory_mib))
            await asyncio.sleep(PERIOD_S)

    def note(self, at: float, sizes: Mapping[str, float]) -> None:
        """One look at all of them."""
        self._last = at
        for name, size in sizes.items():
            self._seen[name].append((at, size))

    def note_calm(self, at: float) -> None:
        """Nobody is killed any more, and everything is whole."""
        self._calm_at = at

    def table(self) -> str:
        """A line for each process: how long it was seen, least and most MiB, MiB an hour."""
        lines = [f"{'process':28}  seen s  least  most MiB  MiB/hour"]
        for name, seen in sorted(self._seen.items()):
            sizes = [size for _, size in seen]
            slope = _slope(self._settled(name))
            told = "-" if slope is None else f"{slope:+.1f}"
            lines.append(f"{name:28}  {_span(seen):6.0f}  {min(sizes):5.0f}  {max(sizes):8.0f}  {told:>8}")
        return "\n".join(lines)

    def slopes(self) -> str:
        """A line for each kind of process: what those grew by that are judged."""
        kinds: defaultdict[str, list[float]] = defaultdict(list)
        for name, slope in self._judged().items():
            kinds[name.split()[0]].append(slope)
        told = [f"{kind}: {', '.join(f'{s:+.1f}' for s in found)}" for kind, found in sorted(kinds.items())]
        return f"MiB an hour: {'; '.join(told) or f'nothing was seen for {LONG_S:g} s once settled'}"

    def faults(self) -> list[str]:
        """Processes that grew, and those that ended although nobody killed them."""
        found: list[str] = []
        for name, slope in self._judged().items():
            hours = _span(self._settled(name)) / 3600
            if slope * hours > STEPS_MIB + MOST_MIB_PER_HOUR * hours:
                found.append(f"{name} grows by {slope:.0f} MiB an hour")
        calm = {name: [at for at, _ in seen if at >= self._calm_at] for name, seen in self._seen.items()}
        ends = {name: times[-1] for name, times in calm.items() if times}
        return found + [
            f"{name} ended by itself" for name, end in ends.items() if end < self._last - 3 * PERIOD_S
        ]

    def _judged(self) -> dict[str, float]:
        """Slopes of processes that were seen for long."""
        found: dict[str, float] = {}
        for name in sorted(self._seen):
            settled = self._settled(name)
            slope = _slope(settled)
            if slope is not None and _span(settled) >= LONG_S:
                found[name] = slope
        return found

    def _settled(self, name: str) -> Sizes:
        """What was seen of a process from the time on that its caches are full."""
        seen = self._seen[name]
        return [(at, size) for at, size in seen if at >= seen[0][0] + SETTLED_S]


def _span(seen: Sizes) -> float:
    return seen[-1][0] - seen[0][0] if seen else 0.0


def _slope(seen: Sizes) -> float | None:
    """MiB an hour; None where there is too little to tell."""
    if len(seen) < 5:
        return None
    times, sizes = zip(*seen, strict=True)
    return 3600 * statistics.linear_regression(times, sizes).slope
