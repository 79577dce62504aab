"""Resident memory of each serving process over time, and its slope."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from tests.faults.application import Application

PERIOD_S = 5.0
WARM_S = 60.0  # a young process still fills its caches
LONG_S = 1200.0  # a slope over less says more of the start than of a leak
MOST_MIB_PER_HOUR = 32.0


class MemoryWatch:
    """Looks at every process of an application now and then."""

    def __init__(self, app: Application):
        self._app = app
        self._seen: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    async def watch(self, is_over: Callable[[], bool]) -> None:
        """Look until it is over."""
        while not is_over():
            now = time.monotonic()
            for name, size in (await asyncio.to_thread(self._app.memory_mib)).items():
                self._seen[name].append((now, size))
            await asyncio.sleep(PERIOD_S)

    def table(self) -> str:
        """A line for each process: how long it was seen, least and most MiB, MiB an hour."""
        lines = [f"{'process':28}  seen s  least  most MiB  MiB/hour"]
        for name, seen in sorted(self._seen.items()):
            sizes = [size for _, size in seen]
            slope = self._slope(name)
            told = "-" if slope is None else f"{slope:+.1f}"
            span = seen[-1][0] - seen[0][0]
            lines.append(f"{name:28}  {span:6.0f}  {min(sizes):5.0f}  {max(sizes):8.0f}  {told:>8}")
        return "\n".join(lines)

    def faults(self) -> list[str]:
        """Processes that lived long and grew."""
        found: list[str] = []
        for name, seen in self._seen.items():
            slope = self._slope(name)
            is_long = seen[-1][0] - seen[0][0] >= LONG_S
            if slope is not None and is_long and slope > MOST_MIB_PER_HOUR:
                found.append(f"{name} grows by {slope:.0f} MiB an hour")
        return found

    def _slope(self, name: str) -> float | None:
        """MiB an hour, once warm; None where there is too little to tell."""
        seen = self._seen[name]
        warm = [(at, size) for at, size in seen if at >= seen[0][0] + WARM_S]
        if len(warm) < 5:
            return None
        times, sizes = zip(*warm, strict=True)
        return 3600 * statistics.linear_regression(times, sizes).slope
