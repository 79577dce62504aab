"""Arms played in turn, and a line for each."""

import statistics
import sys
import time
from collections.abc import Mapping

from tests.benchmarks.peers.setting import Answers, Play


def compare(arms: Mapping[str, Play], repeat: int) -> list[str]:
    """Play the arms in turn, ``repeat`` times after one that does not count; return the table's lines."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    equal: dict[str, int] = {}
    reference: Answers = []
    for repetition in range(repeat + 1):
        for name, play in arms.items():
            began = time.perf_counter()
            answers = play()
            rate = sum(map(len, answers)) / (time.perf_counter() - began)
            reference = reference or answers
            same = sum(a == b for a, b in zip(answers, reference, strict=True))
            equal[name] = min(same, equal.get(name, same))
            if repetition > 0:
                rates[name].append(rate)
            print(f"{repetition} {name}: {rate:.0f} tok/s", file=sys.stderr, flush=True)
    first = statistics.median(next(iter(rates.values())))
    return [
        f"{name:38s} {min(values):7.0f} {statistics.median(values):7.0f} {max(values):7.0f} tok/s, "
        f"{statistics.median(values) / first:5.2f}x, {equal[name]} of {len(reference)} equal"
        for name, values in rates.items()
    ]
