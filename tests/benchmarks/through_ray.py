"""The same chats in one process, and through router, target and drafter on Ray Serve: what the way costs.

    python -m tests.benchmarks.through_ray --prompts FILE [--limit 32] [--rows 4] [--width 16] [--repeat 3]

Serves the embedded pair once with each of --transports and asks it by the router's handle, over HTTP and over
gRPC, ``rows`` at a time; beside them the engine plays the same rows here. Arms interleaved, the first
repetition not counted; saved states of chats are off, so that each is read anew everywhere. Prints tokens per
second (least, median, most), the ratio to one process, milliseconds per round and what each way adds to one.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from tests.faults import alone  # noqa: F401

# isort: split
import dflash_core  # loads the BLAS that MLX is to find, so it comes before it

# isort: split
import httpx2
from ray import serve

from deployments.app import APP_NAME
from deployments.bench import machine
from deployments.client import AsyncClient, Tokens, ask
from deployments.generation import Generation, GenerationId, TextTokens
from deployments.prompts import read_prompts
from deployments.rpc.dflash.v1.dflash_pb2 import Sampling
from deployments.settings import Place, Placement, Settings
from deployments.up import serving
from dflash_core.checkpoints import resolve_drafter, resolve_target
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.request import RowRequest, WindowId
from dflash_core.text import Tokenizer
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from dflash_core.workload import play_all
from tests.benchmarks import http_load
from tests.deployments.conftest import free_port

Answers = list[tuple[int, ...]]
Arm = Callable[[], Awaitable[tuple[Answers, float]]]  # token ids, and how many rounds they took
_numbers = count()


@dataclass
class Samples:
    """One arm's repetitions."""

    tok_s: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    equal: int = 0

    def line(self, name: str, first: "Samples", num_rows: int) -> str:
        """A row of the table."""
        rates = ", ".join(f"{f(self.tok_s):.0f}" for f in (min, statistics.median, max))
        ratios = [own / other for own, other in zip(self.tok_s, first.tok_s, strict=True)]
        spent = statistics.median(self.round_ms)
        return (
            f"{name:24s} {rates:>15s} tok/s, {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) of one process, {spent:5.1f} ms a round, "
            f"{spent - statistics.median(first.round_ms):+5.1f}, {self.equal} of {num_rows} equal"
        )


def in_process(lane: LoadedLane, requests: Sequence[RowRequest], rows: int, width: int) -> Arm:
    """The engine alone."""

    async def play() -> tuple[Answers, float]:
        policy = WindowPolicy(FixedWidth(width), rows)
        window = Window(WindowId("here"), lane.target, lane.drafter, policy)
        played = play_all(window, requests)  # MLX's streams belong to this thread, and nobody else waits
        return [played.tokens[request.row_id] for request in requests], played.totals.rounds

    return play


def together(
    one: Callable[[RowRequest], Awaitable[tuple[int, ...]]],
    requests: Sequence[RowRequest],
    rows: int,
    client: httpx2.AsyncClient,
) -> Arm:
    """``rows`` requests at a time, each asked by ``one``; ``client`` reads the counters."""

    async def limited(row: RowRequest, limit: asyncio.Semaphore) -> tuple[int, ...]:
        async with limit:
            return await one(row)

    async def play() -> tuple[Answers, float]:
        before, limit = await http_load.counters(client), asyncio.Semaphore(rows)
        answers = await asyncio.gather(*(limited(row, limit) for row in requests))
        return answers, (await http_load.counters(client))["rounds"] - before["rounds"]

    return play


async def by_handle(row: RowRequest) -> tuple[int, ...]:
    """The router's own method, called from here."""
    handle = serve.get_app_handle(APP_NAME).options(method_name="generate", stream=True)
    request = Generation(
        GenerationId(f"way-{next(_numbers)}"),
        "demo",
        row.tokens,
        row.max_tokens,
        row.sampling,
        row.stop_token_ids,
        (),
        300.0,
    )
    events = [event async for event in cast(Any, handle.remote(request))]
    return tuple(token for event in events if isinstance(event, TextTokens) for token in event.token_ids)


async def over_grpc(calls: AsyncClient, row: RowRequest) -> tuple[int, ...]:
    """As clients of the other contract come."""
    sampling = Sampling(temperature=row.sampling.temperature)
    spec = ask("demo", row.tokens, max_tokens=row.max_tokens, sampling=sampling)
    events = [event async for event in calls.generate(spec)]
    return tuple(token.id for event in events if isinstance(event, Tokens) for token in event.tokens)


def over_http(bodies: list[dict[str, Any]], rows: int, client: httpx2.AsyncClient) -> Arm:
    """As clients come."""

    async def play() -> tuple[Answers, float]:
        before = await http_load.counters(client)
        answers = await http_load.play(client, bodies, rows)
        rounds = (await http_load.counters(client))["rounds"] - before["rounds"]
        return [tuple(ids) for _, ids in answers], rounds

    return play


async def interleaved(arms: dict[str, Arm], repeat: int) -> dict[str, Samples]:
    """All arms, ``repeat`` times after one that does not count."""
    samples = {name: Samples() for name in arms}
    first: Answers = []
    for repetition in range(repeat + 1):
        for name, arm in list(arms.items())[:: -1 if repetition % 2 else 1]:
            began = time.perf_counter()
            answers, rounds = await arm()
            seconds = time.perf_counter() - began
            first = first or answers
            samples[name].equal = sum(own == other for own, other in zip(answers, first, strict=True))
            if repetition:
                samples[name].tok_s.append(sum(map(len, answers)) / seconds)
                samples[name].round_ms.append(1e3 * seconds / rounds)
    return samples


async def compare(options: argparse.Namespace, here: Arm, settings: Settings) -> None:
    """The table of one transport."""
    requests, bodies = options.requests, options.bodies
    url = f"http://{settings.host}:{settings.http_port}"
    async with (
        httpx2.AsyncClient(base_url=url, timeout=300) as client,
        AsyncClient(f"127.0.0.1:{settings.grpc_port}") as calls,
    ):
        arms = {
            "one process": here,
            f"{settings.transport}, by handle": together(by_handle, requests, options.rows, client),
            f"{settings.transport}, over HTTP": over_http(bodies, options.rows, client),
            f"{settings.transport}, over gRPC": together(
                partial(over_grpc, calls), requests, options.rows, client
            ),
        }
        samples = await interleaved(arms, options.repeat)
    for name, own in samples.items():
        print(own.line(name, samples["one process"], len(requests)), flush=True)


def main() -> None:
    """Read the options, serve with each transport, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--transports", default="auto,value,ref")
    options = parser.parse_args()
    target = resolve_target("embedded")
    lane = load_lane(target, resolve_drafter("embedded"))
    options.requests = read_prompts(options.prompts, Tokenizer.load(target), limit=options.limit)
    bodies = http_load.read_bodies(options.prompts, options.limit)
    options.bodies = [{**body, "model": "demo"} for body in bodies]
    here = in_process(lane, options.requests, options.rows, options.width)
    small = Place(num_cpus=0.1)
    print(machine(), dflash_core.blas.prepare(), flush=True)
    for transport in options.transports.split(","):
        with tempfile.TemporaryDirectory(prefix="dfb", dir="/tmp") as folder:
            settings = Settings(
                http_port=free_port(),
                grpc_port=free_port(),
                transport=transport,
                max_rows=options.rows,
                block_width=options.width,
                prefix_bytes=0,
                probe_s=1.0,
                cache_dir=Path(folder),
                placement=Placement(router=small, target=small, drafter=small),
            )
            with serving(settings):
                asyncio.run(compare(options, here, settings))


if __name__ == "__main__":
    main()
