"""How many lanes a router carries: lanes are stand-ins that sleep (``stand_ins.py``), all else is real.

    python -m tests.benchmarks.scale               # the router's desk, lanes in its process, its own core
    python -m tests.benchmarks.scale --way http    # behind our HTTP edge, clients in a process beside it
    python -m tests.benchmarks.scale --way serve --lanes 1,4,16 --routers 1,2    # all of it on Ray Serve

Each lane is full all the time: as many clients as rows, which ask again as soon as they are answered. Delay
is from a round's end on its lane to the client's having its tokens. The knee is where its 99th percentile
passes 10 ms; what lies past it is saturated. With several routers each has a window on every lane and its
share of the rows; ``desk`` measures one of them, for they are alike.

``desk`` goes by CPU time (``cpu_clock.py``), so that a busy machine does not matter. The other ways go by the
wall clock; beside them an idle process notes how late its own timers are, and that much is not the router's.
"""

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import dflash_core.pair
from deployments.generation import Generation, GenerationId, TextTokens
from dflash_core.request import Sampling
from dflash_core.text.tokenizer import Tokenizer
from tests.benchmarks.cpu_clock import CpuTimeLoop
from tests.benchmarks.stand_ins import ROUND_S, DeskBackend, SimulatedStage, lateness

MODULE = "tests.benchmarks.scale"
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


# Clients in the router's process


async def ask_desk(backend: DeskBackend, numbers: Iterator[int], heard: Heard, times: Times) -> None:
    """One client: asks again and again until the time is over."""
    clock = asyncio.get_running_loop().time
    begin, end = times
    await asyncio.sleep(WARM_S / 2 * (next(numbers) * 0.618 % 1))  # lanes are in no step
    while clock() < end:
        number = next(numbers)
        generation = Generation(
            GenerationId(f"g{number}"), "demo", (1, number), length(number), Sampling(), frozenset(), (), 60.0
        )
        try:
            async for event in backend.generate(generation):
                now = clock()
                if isinstance(event, TextTokens) and begin <= now < end:
                    heard.delays.append(lateness(event.token_ids, now))
            heard.answers += 1
        except Exception:
            heard.failures += 1


async def measure_desk(lanes: int, rows: int, seconds: float, round_s: float) -> Figures:
    clock = asyncio.get_running_loop().time
    stage = SimulatedStage(lanes, round_s)
    backend = DeskBackend(stage, tokenizer(), rows)
    heard, numbers = Heard(), itertools.count()
    begin = clock() + WARM_S
    times = (begin, begin + seconds)
    clients = [asyncio.ensure_future(ask_desk(backend, numbers, heard, times)) for _ in range(lanes * rows)]
    await asyncio.sleep(begin - clock())
    cpu, own = time.process_time(), stage.cpu_s
    await asyncio.sleep(seconds)
    cpu = time.process_time() - cpu - (stage.cpu_s - own)
    await asyncio.gather(*clients)
    backend.desk.close()
    return Figures(lanes, rows, 1, heard, seconds, cpu)


# Clients over HTTP, in a process of their own


async def ask_http(port: int, number: int, heard: Heard, times: Times) -> None:
    """One client with one connection; reads the bytes itself: a library would cost more than the server."""
    begin, end = times
    body = json.dumps(
        {
            "model": "demo",
            "prompt": [1, 2],
            "max_tokens": length(number),
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    await asyncio.sleep(WARM_S / 2 * (number * 0.618 % 1))
    while time.monotonic() < end:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while time.monotonic() < end:
                    writer.write(head + body)
                    if not await read_answer(reader, heard, begin, end):
                        heard.failures += 1
                        break
                    heard.answers += 1
            finally:
                writer.close()


async def read_answer(reader: asyncio.StreamReader, heard: Heard, begin: float, end: float) -> bool:
    """Read one answer to its end; whether it was complete."""
    if b" 200 " not in await reader.readline():
        return False
    while (line := await reader.readline()) != b"0\r\n":
        if not line:
            return False
        at = line.find(b'"token_ids":[')
        if at > 0:
            now = time.monotonic()
            ids = line[at + 13 : line.index(b"]", at)].split(b",")
            if len(ids) > 1 and begin <= now < end:
                heard.delays.append(lateness([int(ids[0]), int(ids[1])], now))
        elif b'"error"' in line:
            return False
    await reader.readline()
    return True


async def run_clients(port: int, num: int, seconds: float) -> None:
    """The client process: prints when it measures, then what it heard."""
    heard = Heard()
    begin = time.monotonic() + WARM_S
    times = (begin, begin + seconds)
    clients = [asyncio.ensure_future(ask_http(port, i, heard, times)) for i in range(num)]
    await asyncio.gather(*clients)
    print(json.dumps(asdict(heard)))


@asynccontextmanager
async def http_clients(port: int, num: int, seconds: float) -> AsyncIterator["asyncio.Task[Heard]"]:
    """Clients in a process beside this one; the task gives what they heard."""
    words = [
        "-m",
        MODULE,
        "--clients",
        str(num),
        "--port",
        str(port),
        "--seconds",
        str(seconds),
    ]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=subprocess.PIPE)

    async def read() -> Heard:
        out, _ = await process.communicate()
        return Heard(**json.loads(out))

    task = asyncio.ensure_future(read())
    try:
        yield task
    finally:
        with suppress(ProcessLookupError):
            process.terminate()


async def measure_http(lanes: int, rows: int, seconds: float, round_s: float) -> Figures:
    import uvicorn

    from deployments.http import create_app

    stage = SimulatedStage(lanes, round_s)
    backend = DeskBackend(stage, tokenizer(), rows)
    config = uvicorn.Config(create_app(backend), port=0, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with http_clients(port, lanes * rows, seconds) as answer:
        while backend.desk.num_running < lanes * rows and not answer.done():
            await asyncio.sleep(0.1)
        await asyncio.sleep(min(1.0, seconds / 4))
        cpu, own, before = time.process_time(), stage.cpu_s, row_rounds(backend)
        await asyncio.sleep(seconds / 2)
        cpu = time.process_time() - cpu - (stage.cpu_s - own)
        each = cpu / max(1.0, row_rounds(backend) - before)
        heard = await answer
    server.should_exit = True
    await serving
    backend.desk.close()
    return Figures(lanes, rows, 1, heard, seconds, each * len(heard.delays))


def row_rounds(backend: DeskBackend) -> float:
    """Rows' rounds that the router has counted."""
    return backend.statistics.snapshot().values["dflash_row_rounds_total"].get((), 0.0)


def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(dflash_core.pair.__file__).parent / "target")


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
    with asyncio.Runner(loop_factory=CpuTimeLoop) as runner:
        figures = runner.run(measure_desk(lanes, rows // routers, options.seconds, round_s))
    return replace(figures, rows=rows, routers=routers)


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=("desk", "http", "serve"), default="desk")
    parser.add_argument("--lanes", default="1,4,16,64")
    parser.add_argument("--rows", default="4,16")
    parser.add_argument("--routers", default="1")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--round-ms", type=float, default=1e3 * ROUND_S)
    parser.add_argument("--clients", type=int, help="be the client process")
    parser.add_argument("--port", type=int)
    parser.add_argument("--idle", type=float, help="be the idle process")
    options = parser.parse_args()
    if options.idle is not None:
        time_idle(options.idle)
        return
    if options.clients is not None:
        asyncio.run(run_clients(options.port, options.clients, options.seconds))
        return
    grid = [[int(n) for n in text.split(",")] for text in (options.rows, options.routers, options.lanes)]
    with machine_state():
        print(HEADING)
        for rows, routers, lanes in itertools.product(*grid):
            work = partial(measure, options.way, lanes, rows, routers, options)
            print(work() if options.way == "desk" else with_idle(work, options.seconds), flush=True)


if __name__ == "__main__":
    main()
