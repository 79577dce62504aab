"""Chats over HTTP against a running server, at several concurrencies.

    dflash-serve up &
    python tests/benchmarks/http_load.py --prompts FILE --limit 32 --concurrency 1,4,16 --repeat 3

Streams every chat with its own settings, counts completion tokens from the usage, and reads rounds and
accepted tokens off /metrics. Concurrencies are interleaved; the first repetition is not counted.
"""

import argparse
import asyncio
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx2

COUNTERS = {
    "rounds": r"^dflash_rounds_total\{.*\} (\S+)",
    "row_rounds": r"^dflash_row_rounds_total\{.*\} (\S+)",
    "accepted": r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)",
}


def read_bodies(prompts: Path, limit: int) -> list[dict[str, Any]]:
    """The first requests of a batch file, as they are sent."""
    lines = prompts.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["body"] for line in lines if line][:limit]


async def chat(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[int, list[int]]:
    """One streamed chat: completion tokens, and their ids."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    tokens, ids = 0, []
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
                if chunk.get("usage") and not chunk["choices"]:
                    tokens = chunk["usage"]["completion_tokens"]
    return tokens, ids


async def play(client: httpx2.AsyncClient, bodies: list[dict[str, Any]], concurrency: int) -> list[Any]:
    """All chats, at most ``concurrency`` at a time."""
    limit = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> tuple[int, list[int]]:
        async with limit:
            return await chat(client, body)

    return await asyncio.gather(*(one(body) for body in bodies))


async def counters(client: httpx2.AsyncClient) -> dict[str, float]:
    """Sums of the server's counters."""
    text = (await client.get("/metrics")).text
    return {
        name: sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))
        for name, pattern in COUNTERS.items()
    }


async def run(options: argparse.Namespace) -> None:
    """Play, interleaved, and print the table."""
    bodies = read_bodies(options.prompts, options.limit)
    levels = [int(level) for level in options.concurrency.split(",")]
    rates: dict[int, list[float]] = {level: [] for level in levels}
    figures: dict[int, dict[str, float]] = {}
    reference: list[list[int]] = []
    equal: dict[int, int] = {}
    async with httpx2.AsyncClient(base_url=options.url, timeout=300) as client:
        for repetition in range(options.repeat + 1):
            for level in levels:
                before, began = await counters(client), time.perf_counter()
                answers = await play(client, bodies, level)
                seconds, after = time.perf_counter() - began, await counters(client)
                reference = reference or [ids for _, ids in answers]
                equal[level] = sum(ids == r for (_, ids), r in zip(answers, reference, strict=True))
                figures[level] = {name: after[name] - before[name] for name in after}
                if repetition > 0:
                    rates[level].append(sum(tokens for tokens, _ in answers) / seconds)
    for level, values in rates.items():
        low, mid, high = min(values), statistics.median(values), max(values)
        f = figures[level]
        accepted = f["accepted"] / max(f["row_rounds"], 1)
        print(
            f"{level:3d} concurrent: {low:6.0f} {mid:6.0f} {high:6.0f} tok/s, {f['rounds']:.0f} rounds, "
            f"{accepted:.2f} accepted per row-round, {equal[level]} of {len(bodies)} equal"
        )


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--repeat", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
