"""Random traffic and random kills for a long time; then everything must add up, and nothing be left.

    python -m tests.faults.soak --minutes 60 --seed 1

Requests are greedy and sampled, with stops and several choices, streamed and whole, over HTTP and gRPC; some
clients leave in mid-answer. Drafters, targets and proxies are killed one at a time, but in the last third, in
which every process lives long enough for its memory to have a slope. At the end every answer that came
whole equals its reference, the server's counters fit what clients saw, no replica holds state, and no
process grows. Exit code 1 if any of it does not hold.
"""

from tests.faults import alone  # noqa: F401

# isort: split

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.application import KEYS, Application, Pid, application, kill
from tests.faults.memory import MemoryWatch
from tests.faults.streams import CUT, NEVER_ARRIVED, Heard, HttpClient, Question, RpcClient
from tests.faults.traffic import QUESTIONS, References

WORKERS = 6
MORE = (
    Question("Name the capital of Japan, please.", 80, temperature=0.8, seed=3, n=2),
    Question("What is 7 times 8?", 70, n=3, temperature=1.0, seed=8),
    Question("Write a Python function that adds two numbers.", 200, stop="return"),
    Question("Write an SQL query that counts all users.", 150, stop="FROM"),
    Question("Give me a JSON object with a name and an age.", 20),
)
LEAVES = 0.15  # of the requests
PAUSE_S = (8.0, 25.0)  # between a replacement and the next kill
CALM = 1 / 3  # of the time, the last: nobody is killed
PROXY_BACK_S = 60.0
LEFT_S = 60.0
# While a proxy is away nobody else can answer in its place.


@dataclass
class Log:
    """What happened, as clients and killer saw it."""

    heard: list[Heard] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    proxy_away: list[tuple[float, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def may_be_cut(self, heard: Heard) -> bool:
        """Whether a proxy was killed under this answer, and its client was told of a lost connection."""
        is_cut = heard.error in CUT | NEVER_ARRIVED
        return is_cut and any(heard.began < until and since < heard.ended for since, until in self.proxy_away)


class Soak:
    """One run."""

    def __init__(self, app: Application, references: References, seconds: float, seed: int):
        self._app, self._references = app, references
        self._end = time.monotonic() + seconds
        self._calm_at = self._end - CALM * seconds
        self._random = random.Random(seed)
        self.log = Log()
        self.memory = MemoryWatch()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end or self._app.stop.is_set()

    @property
    def _is_calm(self) -> bool:
        return time.monotonic() >= self._calm_at or self._app.stop.is_set()

    async def play(self) -> None:
        """Ask and kill until the time is over, and let the last answers end."""
        workers = [self._work(random.Random(self._random.random())) for _ in range(WORKERS)]
        await asyncio.gather(*workers, self._kill(), self.memory.watch(self._app, lambda: self._is_over))

    async def _work(self, dice: random.Random) -> None:
        key = dice.choice(KEYS)
        async with HttpClient(self._app.url, key) as http, RpcClient(self._app.rpc_address, key) as rpc:
            while not self._is_over:
                question = dice.choice((*QUESTIONS, *MORE))
                heard = Heard(question)
                self.log.heard.append(heard)
                leave_after = dice.randrange(1, 60) if dice.random() < LEAVES else None
                way = dice.choice(("stream", "whole", "rpc")) if question.n == 1 else "whole"
                if way == "rpc":
                    await rpc.stream(question, heard, leave_after=leave_after)
                elif way == "stream":
                    await http.stream(question, heard, leave_after=leave_after)
                else:
                    await self._whole(http, heard, dice, leaves=leave_after is not None)
                await asyncio.sleep(1.0 if heard.error else dice.random() / 4)

    async def _whole(self, http: HttpClient, heard: Heard, dice: random.Random, *, leaves: bool) -> None:
        """A whole answer; whoever leaves does so at any time, in the queue as well."""
        asking = asyncio.create_task(http.whole(heard.question, heard))
        if leaves:
            await asyncio.wait({asking}, timeout=dice.random() * 2)
            if not asking.done():
                asking.cancel()
                heard.was_left = True
        with suppress(asyncio.CancelledError):
            await asking
        heard.ended = time.monotonic()

    async def _kill(self) -> None:
        while not self._is_calm:
            await self._sleep(self._random.uniform(*PAUSE_S))
            if self._is_calm:
                break
            kind = self._random.choice(("Drafter", "Target", "Drafter", "Target", "proxy"))
            if kind == "proxy":
                await self._kill_proxy()
            else:
                deployment = "Drafter" if kind == "Drafter" else "Target"
                pids = sorted(self._app.replicas(deployment).values())
                self.log.kills.append((kill(self._random.choice(pids)), kind))
            if not await asyncio.to_thread(self._app.await_whole, 180.0):
                self.log.faults.append(f"a {kind} was not replaced")
        self.memory.note_calm(time.monotonic())

    async def _kill_proxy(self) -> None:
        pid: Pid = self._random.choice(self._app.proxies())
        struck = kill(pid)
        self.log.kills.append((struck, "proxy"))
        until = struck + PROXY_BACK_S
        self.log.proxy_away.append((struck, until))
        async with httpx2.AsyncClient(base_url=self._app.url, timeout=2) as client:
            while time.monotonic() < until:
                await asyncio.sleep(0.25)
                with suppress(httpx2.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        break
            else:
                self.log.faults.append("the proxy was not replaced")
        self.log.proxy_away[-1] = (struck, time.monotonic() + 2.0)

    async def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_calm:
            await asyncio.sleep(0.2)


def judge(app: Application, references: References, log: Log) -> list[str]:
    """What does not hold."""
    faults = list(log.faults)
    whole = [heard for heard in log.heard if not heard.error and not heard.was_left]
    other = [heard for heard in log.heard if references.num_lost(heard)]
    faults += [f"{heard.question.text!r}: {references.num_lost(heard)} tokens differ" for heard in other]
    for heard in log.heard:
        if heard.error and heard.error != "queue_full" and not log.may_be_cut(heard):
            faults.append(f"{heard.question.text!r} ended by {heard.error}")
    faults += judge_counters(counted_ends(app), whole, log)
    health = app.health()
    if (health["running"], health["waiting"]) != (0, 0):
        faults.append(f"the router still has {health['running']} running, {health['waiting']} waiting")
    faults += [f"left over: {left}" for left in app.await_nothing_left(LEFT_S)]
    return faults


def counted_ends(app: Application) -> Counter[str]:
    """The router's counts of ends, by reason."""
    page = httpx2.get(f"{app.url}/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=30).text
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total":
                counts[sample.labels["finished_reason"]] += int(sample.value)
    return counts


def judge_counters(counts: Counter[str], whole: list[Heard], log: Log) -> list[str]:
    """The router's counts of ends lie between what came whole and what may have."""
    num_references = len(QUESTIONS) + sum(question.n for question in MORE)
    finished = counts["stop"] + counts["length"] - num_references
    least = sum(heard.question.n for heard in whole)
    most = least + sum(heard.question.n for heard in log.heard if heard.may_have_finished)
    print(f"counters: {dict(counts)}; {least} choices came whole, {most - least} were broken off")
    faults = [] if least <= finished <= most else [f"{finished} choices finished, not in {least}..{most}"]
    return faults + ([f"{counts['error']} choices failed"] if counts["error"] else [])


async def run(app: Application, minutes: float, seed: int) -> list[str] | None:
    """Soak and judge; None if stopped."""
    references = await References.hear(app, (*QUESTIONS, *MORE))
    soak = Soak(app, references, 60 * minutes, seed)
    await soak.play()
    if app.stop.is_set():
        return None
    log = soak.log
    ends = Counter("left" if h.was_left else h.error or "whole" for h in log.heard)
    print(f"{len(log.heard)} requests: {dict(ends)}; kills: {dict(Counter(kind for _, kind in log.kills))}")
    faults = await asyncio.to_thread(judge, app, references, log)
    print(soak.memory.table())
    print(soak.memory.slopes())
    return faults + soak.memory.faults()


def main() -> int:
    """Read the options, soak, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    with (
        tempfile.TemporaryDirectory(prefix="dff", dir="/tmp") as folder,
        application(Path(folder, "cache")) as app,
    ):
        print(f"soaking for {options.minutes:g} minutes, seed {options.seed}", flush=True)
        faults = asyncio.run(run(app, options.minutes, options.seed))
    if faults is None:
        return 130
    print("\n".join([*(f"FAULT: {fault}" for fault in faults), f"{len(faults)} faults"]), flush=True)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
