"""What the scale simulation measures: how late clients hear of rounds, and what that costs a router."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import dflash_core.pair
from dflash_core.text.tokenizer import Tokenizer
from tests.benchmarks.stand_ins import DeskBackend, lateness

KNEE_S = 0.010
Times = tuple[float, float]  # of the monotonic clock: from when to when is measured
MEAN_TOKENS = 100  # some 40 rounds
WARM_S = 2.0  # from the first request; connections are made and windows fill


@dataclass
class Heard:
    """What clients heard, each round of each row once."""

    delays: list[float] = field(default_factory=list)
    answers: int = 0
    failures: int = 0

    def quantile(self, q: float) -> float:
        ordered = sorted(self.delays)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True)
class Figures:
    """One measurement."""

    lanes: int
    rows: int
    routers: int
    heard: Heard
    seconds: float
    router_cpu_s: float  # of all routers
    idle_p99_s: float = 0.0  # how late an idle process's timers were at the same time

    def __str__(self) -> str:
        num = len(self.heard.delays)
        p50, p99 = (1e3 * self.heard.quantile(q) for q in (0.5, 0.99))
        idle = 1e3 * self.idle_p99_s
        verdict = "" if p99 - idle <= 1e3 * KNEE_S else "  saturated"
        return (
            f"{self.lanes:5d} {self.rows:5d} {self.routers:8d} {num / self.seconds:13.0f} "
            f"{1e6 * self.router_cpu_s / max(num, 1):10.0f} {100 * self.router_cpu_s / self.seconds:6.0f} "
            f"{p50:8.2f} {p99:8.2f} {idle:9.2f} {self.heard.failures:5d}{verdict}"
        )


HEADING = "lanes  rows  routers  row-rounds/s  µs CPU each  CPU %  p50 ms   p99 ms  idle p99  lost"


def length(number: int) -> int:
    """Tokens of an answer: of no two neighbours the same."""
    return MEAN_TOKENS // 2 + number * 37 % MEAN_TOKENS


def body_of(number: int) -> bytes:
    return json.dumps(
        {
            "model": "demo",
            "prompt": [1, 2],
            "max_tokens": length(number),
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
    ).encode()


def hear(line: bytes, now: float, heard: Heard, times: Times) -> None:
    """Note how late a line of an event stream is."""
    at = line.find(b'"token_ids":[')
    if at > 0 and times[0] <= now < times[1]:
        ids = line[at + 13 : line.index(b"]", at)].split(b",")
        if len(ids) > 1:
            heard.delays.append(lateness([int(ids[0]), int(ids[1])], now))


def cost_of(costs: list[tuple[float, float]], heard: Heard) -> float:
    """CPU seconds of what was heard, from CPU seconds and rows' rounds at both ends."""
    (cpu, rounds), (cpu_after, rounds_after) = costs
    return (cpu_after - cpu) / max(1.0, rounds_after - rounds) * len(heard.delays)


def row_rounds(backend: DeskBackend) -> float:
    """Rows' rounds that the router has counted."""
    return backend.statistics.snapshot().values["dflash_row_rounds_total"].get((), 0.0)


def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(dflash_core.pair.__file__).parent / "target")
