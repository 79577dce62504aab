"""Two real clusters on one machine: B plays the embedded pair, and A has nothing but B as a remote lane.

    python -m tests.benchmarks.two_clusters
    python -m tests.benchmarks.two_clusters --only slow --delay-ms 0,50,200

Asks both the same, in streams, and compares token ids; kills B's target in the middle of an answer; stops B
and asks A; starts B again and asks A. ``slow`` puts a relay between them, by which everything comes so much
later, each way. Prints what each took; fails if a token differs or a promise breaks.
"""

import argparse
import asyncio
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.deployments.conftest import free_port
from tests.deployments.relay import Relay, relay_to

START_S, STOP_S, ANSWER_S = 150.0, 60.0, 120.0
REFUSED_S = 15.0  # a clear answer comes within so long where there is no lane
QUESTIONS = ("What is the capital of France?", "Write a function that adds two numbers.")
TARGET = "ServeReplica:dflash:Target"


class Cluster:
    """``dflash-serve up`` with settings of its own; its ports stay when it starts again."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]):
        self.name = name
        self.ports = {"http_port": free_port(), "grpc_port": free_port()}
        self._folder = folder
        self._file = folder / f"{name}.yaml"
        self._file.write_text(json.dumps(self.ports | settings))  # JSON is YAML
        self._process: subprocess.Popen[str] | None = None
        self._family: dict[int, psutil.Process] = {}  # what it started, for the end

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http_port']}"

    def start(self) -> float:
        """Return once it is ready, with the seconds that took."""
        began = time.monotonic()
        variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        variables["DFLASH_CACHE_DIR"] = str(self._folder / "cache")
        command = [str(Path(sys.executable).parent / "dflash-serve"), "up", "--config", str(self._file)]
        log = (self._folder / f"{self.name}.log").open("a")
        self._process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        is_ready = any(line.startswith("ready:") for line in self._process.stdout)
        late.cancel()
        if not is_ready:
            raise RuntimeError(
                f"cluster {self.name} did not start; {log.name} has its words:\n{tail(log.name)}"
            )
        self._note_family()
        return time.monotonic() - began

    def stop(self) -> None:
        """Ask it to end, and see to it that nothing of it runs on."""
        if self._process is None:
            return
        self._note_family()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in self._family.values():
            if process.is_running():  # psutil tells by the start time whether the id is still its own
                process.kill()
        self._process, self._family = None, {}

    def kill_target(self) -> None:
        """End the target's process, as a crash would."""
        self._note_family()
        targets = [p for p in self._family.values() if p.is_running() and TARGET in " ".join(p.cmdline())]
        if len(targets) != 1:
            raise RuntimeError(f"cluster {self.name} has {len(targets)} targets")
        targets[0].kill()

    def _note_family(self) -> None:
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._family |= {child.pid: child for child in children}


def tail(path: str) -> str:
    return "\n".join(Path(path).read_text().splitlines()[-15:])


@dataclass
class Answer:
    """A streamed chat: its tokens and when they came, in seconds from the question."""

    status: int
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))

    @property
    def rate(self) -> float:
        return (len(self.ids) - 1) / (self.times[-1] - self.times[0])


def ask(
    cluster: Cluster,
    question: str,
    max_tokens: int,
    temperature: float = 0.0,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Answer:
    """``on_tokens`` is told how many there are, each time that some come."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    began = time.monotonic()
    with httpx2.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=ANSWER_S) as response:
        answer = Answer(response.status_code)
        if response.status_code != 200:
            answer.error = json.loads(response.read())["error"]["message"]
            answer.times.append(time.monotonic() - began)
            return answer
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                answer.error = chunk["error"]["message"]
            ids = [i for choice in chunk.get("choices", ()) for i in choice.get("token_ids") or ()]
            if ids:
                answer.ids += ids
                answer.times.append(time.monotonic() - began)
                on_tokens(len(answer.ids))
    return answer


class Checks:
    """Prints what was seen, and remembers what should not have been."""

    def __init__(self) -> None:
        self.num_broken = 0

    def say(self, text: str, *, holds: bool = True) -> None:
        self.num_broken += not holds
        print(f"{'' if holds else 'BROKEN  '}{text}", flush=True)


def compare(checks: Checks, a: Cluster, b: Cluster, repeat: int) -> None:
    """The same chats at both."""
    num, equal = 0, 0
    firsts: dict[str, list[float]] = {"a": [], "b": []}
    rates: dict[str, list[float]] = {"a": [], "b": []}
    for repetition in range(repeat + 1):  # the first one does not count
        for question in QUESTIONS:
            for temperature in (0.0, 1.0):
                answers = {c.name: ask(c, question, 120, temperature) for c in (b, a)}
                num += 1
                equal += answers["a"].ids == answers["b"].ids and len(answers["a"].ids) == 120
                for name, answer in answers.items() if repetition else ():
                    firsts[name].append(1e3 * answer.times[0])
                    rates[name].append(answer.rate)
    checks.say(f"{equal} of {num} chats through A equal those at B", holds=equal == num)
    for name in ("b", "a"):
        first, rate = firsts[name], rates[name]
        checks.say(
            f"  at {name.upper()}: first token {spread(first)} ms, then {spread(rate)} tokens a second"
            f" (least, median, most of {len(first)})"
        )


def spread(values: list[float]) -> str:
    return f"{min(values):.0f}, {statistics.median(values):.0f}, {max(values):.0f}"


def lose_target(checks: Checks, a: Cluster, b: Cluster) -> None:
    """B's target dies while it answers A."""
    reference = ask(b, QUESTIONS[1], 400)
    is_dead = threading.Event()

    def kill_once(count: int) -> None:
        if count > 40 and not is_dead.is_set():
            is_dead.set()
            b.kill_target()

    answer = ask(a, QUESTIONS[1], 400, on_tokens=kill_once)
    checks.say(
        f"B's target killed after 40 tokens of 400: {len(answer.ids)} came,"
        f" {'equal' if answer.ids == reference.ids else 'not equal'}, longest gap {answer.longest_gap:.1f} s"
        f" {answer.error}",
        holds=answer.ids == reference.ids and is_dead.is_set() and len(answer.ids) == 400,
    )


def lose_cluster(checks: Checks, a: Cluster, b: Cluster) -> None:
    """B is stopped, and comes back."""
    reference = ask(b, QUESTIONS[0], 60)
    b.stop()
    for word in ("first", "next"):
        began = time.monotonic()
        answer = ask(a, QUESTIONS[0], 60)
        took = time.monotonic() - began
        told = f"B stopped, {word} request at A: {answer.status} after {took:.1f} s: {answer.error}"
        # A stream that has had its comments while it waited ends by an error of its own.
        is_refused = answer.status == 503 or (bool(answer.error) and not answer.ids)
        checks.say(told, holds=is_refused and took < REFUSED_S)
    health = httpx2.get(f"{a.url}/health", timeout=10)
    checks.say(
        f"  /health of A: {health.status_code}, {json.dumps(health.json()['remote_lanes'])}",
        holds=health.status_code == 503,
    )
    seconds = b.start()
    began = time.monotonic()
    while (answer := ask(a, QUESTIONS[0], 60)).status != 200 and time.monotonic() - began < ANSWER_S:
        time.sleep(0.2)
    checks.say(
        f"B started again in {seconds:.0f} s; A answers {time.monotonic() - began:.1f} s later,"
        f" {'equal' if answer.ids == reference.ids else f'not equal ({answer.error})'}",
        holds=answer.ids == reference.ids,
    )


def slow_link(checks: Checks, a: Cluster, b: Cluster, relay: Relay, delays: list[int], repeat: int) -> None:
    """The same chats at A, by a link that is longer each time."""
    references = [ask(b, question, 120).ids for question in QUESTIONS]
    for delay in delays:
        relay.delay_s = delay / 1000
        ask(a, QUESTIONS[0], 8)  # whoever opens the connection does not count
        answers = [[ask(a, question, 120) for question in QUESTIONS] for _ in range(repeat)]
        equal = all([answer.ids for answer in round_] == references for round_ in answers)
        flat = [answer for round_ in answers for answer in round_]
        first, rate = [1e3 * answer.times[0] for answer in flat], [answer.rate for answer in flat]
        words = f"first token {spread(first)} ms, then {spread(rate)} tokens a second, {len(flat)} chats"
        checks.say(f"{delay} ms each way: {words}, {'equal' if equal else 'not equal'}", holds=equal)


@contextmanager
def relayed(port: int) -> Iterator[Relay]:
    """A relay to the port, on a thread of its own."""
    opened: queue.Queue[tuple[Relay, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def relay_until_told() -> None:
        is_over = asyncio.Event()
        async with relay_to(port) as relay:
            opened.put((relay, asyncio.get_running_loop(), is_over))
            await is_over.wait()
        await asyncio.sleep(0.2)  # connections that were broken off come to their ends

    thread = threading.Thread(target=lambda: asyncio.run(relay_until_told()))
    thread.start()
    relay, loop, is_over = opened.get(timeout=10)
    try:
        yield relay
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()


@contextmanager
def two_clusters(folder: Path, *, is_relayed: bool) -> Iterator[tuple[Cluster, Cluster, Relay | None]]:
    """A and B, and what is between them; they are gone afterwards."""
    with ExitStack() as stack:
        b = Cluster("b", folder, {"calibration_s": 3, "probe_s": 3, "max_rows": 4})
        relay = stack.enter_context(relayed(b.ports["grpc_port"])) if is_relayed else None
        port = b.ports["grpc_port"] if relay is None else relay.port
        lanes = {"local_lanes": False, "remote_lanes": [f"127.0.0.1:{port}"], "max_rows": 4}
        a = Cluster("a", folder, lanes)
        stack.callback(b.stop)
        stack.callback(a.stop)
        print(f"B ready after {b.start():.0f} s, A after {a.start():.0f} s", flush=True)
        yield a, b, relay


def main() -> int:
    """Start both, play, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=2, help="of the comparison")
    parser.add_argument(
        "--only", default="equal,target,cluster", help="which parts, with commas; slow is one"
    )
    parser.add_argument("--delay-ms", default="0,50,200", help="of the slow part, each way, with commas")
    options = parser.parse_args()
    parts = options.only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take all of it down
    checks = Checks()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="dft", dir="/tmp") as folder,
        two_clusters(Path(folder), is_relayed="slow" in parts) as (a, b, relay),
    ):
        if "equal" in parts:
            compare(checks, a, b, options.repeat)
        if "target" in parts:
            lose_target(checks, a, b)
        if "cluster" in parts:
            lose_cluster(checks, a, b)
        if relay is not None:
            slow_link(checks, a, b, relay, [int(d) for d in options.delay_ms.split(",")], options.repeat)
    return int(checks.num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
