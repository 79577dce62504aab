"""How many lanes a router carries: lanes are stand-ins that sleep (``stand_ins.py``), all else is real.

    python -m tests.benchmarks.scale               # the router's desk, lanes in its process, its own core
    python -m tests.benchmarks.scale --way edge    # and our HTTP edge before it, called as Ray's proxy does
    python -m tests.benchmarks.scale --way http    # and sockets, with clients in a process beside it
    python -m tests.benchmarks.scale --way serve --lanes 1,4,16 --routers 1,2    # all of it on Ray Serve

Each lane is full all the time: as many clients as rows, which ask again as soon as they are answered. Delay
is from a round's end on its lane to the client's having its tokens. The knee is where its 99th percentile
passes 10 ms; what lies past it is saturated. With several routers each has a window on every lane and its
share of the rows; but for ``serve`` one of them is measured, for they are alike.

``desk`` and ``edge`` go by CPU time (``cpu_clock.py``), so that a busy machine does not matter. The other
ways go by the wall clock; beside them an idle process notes how late its own timers are, and that much is not
the router's.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tests.benchmarks.cpu_clock import CpuTimeLoop
from tests.benchmarks.scale_figures import HEADING, WARM_S, Figures
from tests.benchmarks.scale_http import measure_http
from tests.benchmarks.scale_inside import measure_desk, measure_edge
from tests.benchmarks.stand_ins import ROUND_S

MODULE = "tests.benchmarks.scale"


@contextmanager
def machine_state() -> Iterator[None]:
    """Say on what, and how busy it was before and after."""
    print(f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}", flush=True)
    yield
    print(f"load after {os.getloadavg()[0]:.1f}")


def time_idle(seconds: float) -> None:
    """Be the idle process: print the 99th percentile of its timers' lateness."""

    async def work() -> float:
        loop, late = asyncio.get_running_loop(), []
        end = loop.time() + seconds
        while (due := loop.time() + 0.01) < end:
            await asyncio.sleep(0.01)
            late.append(loop.time() - due)
        return sorted(late)[int(0.99 * len(late))]

    print(asyncio.run(work()))


def with_idle(work: Callable[[], Figures], seconds: float) -> Figures:
    """The same figures with those of an idle process beside them."""
    words = [sys.executable, "-m", MODULE, "--idle", str(WARM_S + seconds)]
    idle = subprocess.Popen(words, stdout=subprocess.PIPE)
    figures = work()
    return replace(figures, idle_p99_s=float(idle.communicate()[0]))


def measure(way: str, lanes: int, rows: int, routers: int, options: argparse.Namespace) -> Figures:
    """One line of the table."""
    round_s = options.round_ms / 1e3
    if way == "serve":
        from tests.benchmarks.scale_serve import measure_serve

        return measure_serve(lanes, rows, routers, options.seconds, round_s)
    if rows % routers:
        raise SystemExit(f"{rows} rows cannot be shared out over {routers} routers")
    if way == "http":
        return asyncio.run(measure_http(lanes, rows // routers, options.seconds, round_s))
    work = measure_edge if way == "edge" else measure_desk
    with asyncio.Runner(loop_factory=CpuTimeLoop) as runner:
        figures = runner.run(work(lanes, rows // routers, options.seconds, round_s))
    return replace(figures, rows=rows, routers=routers)


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("desk", "edge", "http", "serve"), default="desk")
    parser.add_argument("--lanes", default="1,4,16,64")
    parser.add_argument("--rows", default="4,16")
    parser.add_argument("--routers", default="1")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--round-ms", type=float, default=1e3 * ROUND_S)
    parser.add_argument("--idle", type=float, help="be the idle process")
    options = parser.parse_args()
    if options.idle is not None:
        time_idle(options.idle)
        return
    grid = [[int(n) for n in text.split(",")] for text in (options.rows, options.routers, options.lanes)]
    with machine_state():
        print(HEADING)
        for rows, routers, lanes in itertools.product(*grid):
            work = partial(measure, options.way, lanes, rows, routers, options)
            print(work() if options.way in ("desk", "edge") else with_idle(work, options.seconds), flush=True)


if __name__ == "__main__":
    main()
