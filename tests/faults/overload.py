"""Four times the capacity for a minute: who has a place keeps its pace, the others hear so at once."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.application import KEYS, Application
from tests.faults.report import Row
from tests.faults.streams import Heard, HttpClient, RpcClient
from tests.faults.traffic import QUESTIONS, References

TIMES = 4
RPC_EVERY = 4  # request of the flood, the others are HTTP
FLOOD_S = 60.0
CALM_S = 20.0
SETTLED_S = 4.0  # until every row plays
REFUSED_S = 0.1
KEPT = 0.8  # of the pace
MOST_GROWTH_MIB = 64.0  # of one process


@dataclass
class _Flood:
    heard: list[Heard] = field(default_factory=list)
    most_waiting: int = 0

    @property
    def served(self) -> list[Heard]:
        return [heard for heard in self.heard if heard.error != "queue_full"]

    @property
    def refused(self) -> list[Heard]:
        """At the door."""
        return [heard for heard in self.heard if heard.error == "queue_full" and not _made_room(heard)]

    @property
    def displaced(self) -> list[Heard]:
        """In the queue, to let another client in."""
        return [heard for heard in self.heard if _made_room(heard)]


async def overload(app: Application, references: References, seconds: float = FLOOD_S) -> Row:
    """One client sends four times what is served, another asks one thing after the other beside it."""
    row = Row(f"{TIMES} x capacity for {seconds:g} s")
    began = time.monotonic()
    calm = await _at_capacity(app, CALM_S)
    pace = _pace(app, calm, began, CALM_S)
    rate = pace * app.num_rows / statistics.mean(heard.num_tokens for heard in calm)
    before = await asyncio.to_thread(app.memory_mib)
    began = time.monotonic()
    flood, polite = await _flood(app, TIMES * rate, seconds)
    after = await asyncio.to_thread(app.memory_mib)
    ended = time.monotonic()
    alone = await _alone(app)
    row.recovery_s = alone.samples[0].at - ended

    everyone = [*flood.served, *polite]
    row.num_lost = sum(references.num_lost(heard) for heard in [*everyone, alone])
    row.num_errors = sum(bool(heard.error) for heard in flood.served)
    row.require(not row.num_lost, "a token was lost")
    row.require(not row.num_errors, "a stream that had a place had an error")
    statuses = {heard.status for heard in flood.heard}
    row.require(statuses <= {200, 429}, f"statuses {statuses}")
    _judge_refusals(row, app, flood)
    kept = _pace(app, [*flood.served, *polite], began, seconds) / pace
    row.notes.append(f"{rate:.2f} answers/s and {pace:.1f} tok/s a row at capacity, pace kept {kept:.2f}")
    row.require(kept >= KEPT, f"running rows kept {kept:.2f} of their pace")
    growth = {name: after[name] - size for name, size in before.items() if name in after}
    largest = max(growth, key=growth.__getitem__)
    row.notes.append(f"largest growth {growth[largest]:+.0f} MiB ({largest.split()[0]})")
    row.require(growth[largest] <= MOST_GROWTH_MIB, "memory grew")
    refusals = sum(heard.status != 200 for heard in polite)
    longest = max(heard.seconds for heard in polite)
    row.notes.append(f"the other client: {len(polite)} answers, longest {longest:.1f} s, refused {refusals}")
    row.require(refusals == 0, "the client that asked little was refused")
    row.require_within(row.recovery_s, 2.0, "first token afterwards")
    return row


def _judge_refusals(row: Row, app: Application, flood: _Flood) -> None:
    row.require(len(flood.refused) > len(flood.served), "hardly anybody was refused: no overload")
    seconds = sorted(heard.seconds for heard in flood.refused)
    if len(seconds) < 2:
        return
    late = statistics.quantiles(seconds, n=100)[98]
    row.detection_s = late
    advised = [heard for heard in flood.refused if heard.retry_after_s]
    row.require(
        len(advised) == len(seconds), f"{len(seconds) - len(advised)} were not told when to come again"
    )
    num_rpc = sum(heard.is_rpc for heard in flood.refused)
    row.require(0 < num_rpc < len(seconds), f"{num_rpc} of {len(seconds)} were refused over gRPC")
    median = statistics.median(seconds)
    row.notes.append(f"429s: {len(seconds)}, {num_rpc} of them over gRPC, median {1000 * median:.0f} ms")
    row.require_within(late, REFUSED_S, "99th percentile of a refusal")
    row.notes.append(f"{len(flood.displaced)} of the queue made room")
    bound = app.settings.max_queue
    row.require(flood.most_waiting <= bound, f"{flood.most_waiting} waited, the bound is {bound}")


def _made_room(heard: Heard) -> bool:
    return heard.error == "queue_full" and "others came" in heard.detail


async def _at_capacity(app: Application, seconds: float) -> list[Heard]:
    """As many clients as rows, each with one answer after the other."""
    heard: list[Heard] = []
    end = time.monotonic() + seconds

    async def ask(number: int) -> None:
        async with HttpClient(app.url, KEYS[1]) as client:
            while time.monotonic() < end:
                question = QUESTIONS[(number + len(heard)) % len(QUESTIONS)]
                heard.append(await client.stream(question, Heard(question)))

    await asyncio.gather(*[ask(number) for number in range(app.num_rows)])
    return heard


async def _flood(app: Application, rate: float, seconds: float) -> tuple[_Flood, list[Heard]]:
    """Requests at a steady rate over HTTP and gRPC, whatever becomes of them."""
    flood, polite = _Flood(), []
    end = time.monotonic() + seconds

    async def look() -> None:
        while time.monotonic() < end:
            health = await asyncio.to_thread(app.health)
            flood.most_waiting = max(flood.most_waiting, health["waiting"])
            await asyncio.sleep(1.0)

    async def ask_politely() -> None:
        async with HttpClient(app.url, KEYS[0]) as client:
            while time.monotonic() < end:
                question = QUESTIONS[len(polite) % len(QUESTIONS)]
                polite.append(await client.stream(question, Heard(question)))

    async with HttpClient(app.url, KEYS[1]) as http, RpcClient(app.rpc_address, KEYS[1]) as rpc:
        others = [asyncio.create_task(look()), asyncio.create_task(ask_politely())]
        tasks: list[asyncio.Task[Heard]] = []
        number, began = 0, time.monotonic()
        while time.monotonic() < end:
            question = QUESTIONS[number % len(QUESTIONS)]
            flood.heard.append(Heard(question))
            client = rpc if number % RPC_EVERY == 0 else http
            tasks.append(asyncio.create_task(client.stream(question, flood.heard[-1])))
            number += 1
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        await asyncio.gather(*tasks, *others)
    return flood, polite


async def _alone(app: Application) -> Heard:
    async with HttpClient(app.url, KEYS[0]) as client:
        return await client.stream(QUESTIONS[0], Heard(QUESTIONS[0]))


def _pace(app: Application, heard: Sequence[Heard], began: float, seconds: float) -> float:
    """Tokens per second of each row while all of them play."""
    since, until = began + SETTLED_S, began + seconds
    tokens = sum(s.num_tokens for one in heard for s in one.samples if since < s.at <= until)
    return tokens / (until - since) / app.num_rows
