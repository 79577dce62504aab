"""Clients over sockets, in a process of their own; run as a program it is that process."""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict

from tests.benchmarks.scale_figures import (
    WARM_S,
    Figures,
    Heard,
    Times,
    body_of,
    cost_of,
    hear,
    row_rounds,
    tokenizer,
)
from tests.benchmarks.stand_ins import DeskBackend, SimulatedStage

MODULE = "tests.benchmarks.scale_http"


async def ask_http(port: int, number: int, heard: Heard, times: Times) -> None:
    """One client with one connection; reads the bytes itself: a library would cost more than the server."""
    end = times[1]
    body = body_of(number)
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
                    if not await read_answer(reader, heard, times):
                        heard.failures += 1
                        break
                    heard.answers += 1
            finally:
                writer.close()


async def read_answer(reader: asyncio.StreamReader, heard: Heard, times: Times) -> bool:
    """Read one answer to its end; whether it was complete."""
    if b" 200 " not in await reader.readline():
        return False
    while (line := await reader.readline()) != b"0\r\n":
        if not line:
            return False
        hear(line, time.monotonic(), heard, times)
        if b'"error"' in line:
            return False
    await reader.readline()
    return True


async def run_clients(port: int, num: int, seconds: float) -> None:
    """The client process: prints when it measures, then what it heard."""
    heard = Heard()
    begin = time.monotonic() + WARM_S
    times = (begin, begin + seconds)
    clients = [asyncio.ensure_future(ask_http(port, i, heard, times)) for i in range(num)]
    for moment in times:
        await asyncio.sleep(moment - time.monotonic())
        print("now", flush=True)
    await asyncio.gather(*clients)
    print(json.dumps(asdict(heard)))


async def play_clients(port: int, num: int, seconds: float, note: Callable[[], Awaitable[None]]) -> Heard:
    """What clients in another process heard; ``note`` is called as they begin to measure and end."""
    words = ["--clients", str(num), "--port", str(port), "--seconds", str(seconds)]
    command = (sys.executable, "-m", MODULE, *words)
    limit = 2**28  # of the line with what they heard
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=limit)
    assert process.stdout is not None
    try:
        for _ in range(2):
            await process.stdout.readline()
            await note()
        return Heard(**json.loads(await process.stdout.readline()))
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


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
    costs: list[tuple[float, float]] = []

    async def note() -> None:
        costs.append((time.process_time() - stage.cpu_s, row_rounds(backend)))

    heard = await play_clients(port, lanes * rows, seconds, note)
    server.should_exit = True
    await serving
    backend.desk.close()
    return Figures(lanes, rows, 1, heard, seconds, cost_of(costs, heard))


def main() -> None:
    """Be the clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    asyncio.run(run_clients(options.port, options.clients, options.seconds))


if __name__ == "__main__":
    main()
