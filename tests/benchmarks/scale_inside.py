"""Clients in the router's process: of its desk alone, and of our HTTP edge before it."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

from deployments.generation import Generation, GenerationId, TextTokens
from dflash_core.request import Sampling
from tests.benchmarks.scale_figures import WARM_S, Figures, Heard, Times, body_of, hear, length, tokenizer
from tests.benchmarks.stand_ins import DeskBackend, SimulatedStage, lateness


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


async def ask_app(app: Any, number: int, heard: Heard, times: Times) -> None:
    """One client, again and again."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(WARM_S / 2 * (number * 0.618 % 1))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    while clock() < times[1]:
        messages = [{"type": "http.request", "body": body_of(number), "more_body": False}]
        gone = asyncio.Event()  # never set

        async def receive(messages: list[Any] = messages, gone: asyncio.Event = gone) -> Any:
            if not messages:
                await gone.wait()
            return messages.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                hear(message["body"], clock(), heard, times)
            elif message["status"] != 200:
                heard.failures += 1

        await app(dict(scope), receive, send)
        heard.answers += 1


async def measure_edge(lanes: int, rows: int, seconds: float, round_s: float) -> Figures:
    from deployments.http import create_app

    clock = asyncio.get_running_loop().time
    stage = SimulatedStage(lanes, round_s)
    backend = DeskBackend(stage, tokenizer(), rows)
    app, heard = create_app(backend), Heard()
    begin = clock() + WARM_S
    times = (begin, begin + seconds)
    clients = [asyncio.ensure_future(ask_app(app, i, heard, times)) for i in range(lanes * rows)]
    await asyncio.sleep(begin - clock())
    cpu, own = time.process_time(), stage.cpu_s
    await asyncio.sleep(seconds)
    cpu = time.process_time() - cpu - (stage.cpu_s - own)
    await asyncio.gather(*clients)
    backend.desk.close()
    return Figures(lanes, rows, 1, heard, seconds, cpu)
