"""Two hosts on one machine: a network namespace each, a virtual cable between them, and what it does.

    sudo .venv/bin/python -m tests.benchmarks.two_hosts          # Linux, as root

The head has the router and a target, the other host the drafter; the engine is the scripted one of the tests,
so every answer is known. Requests run all the time while the cable is first left alone, then out, then slow,
then long, where the kernel has netem. Prints what a round's exchange with the drafter takes in each state,
and fails if anything was lost.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
MODULE = "tests.benchmarks.two_hosts"
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
ROUND_S = 0.05
ROWS = 4


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_namespaces(name: str) -> Iterator[tuple[str, str]]:
    """``NAMEa`` and ``NAMEb`` with a cable between them; both are gone afterwards."""
    a, b = f"{name}a", f"{name}b"
    try:
        for space in (a, b):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", f"v{a}", "netns", a, "type", "veth", "peer", "name", f"v{b}", "netns", b)
        for space, address in ((a, HEAD), (b, OTHER)):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", f"v{space}")
            ip("-n", space, "link", "set", f"v{space}", "up")
        yield a, b
    finally:
        for space in (a, b):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


class Cable:
    """What a person does to it. A namespace may change its own end alone, so this runs outside of both."""

    def __init__(self, ends: tuple[str, str]):
        self._ends = ends

    def set(self, state: str) -> bool:
        """Whether this kernel can do that."""
        match state.split():
            case ["out"]:
                ip("-n", self._ends[1], "link", "set", f"v{self._ends[1]}", "down")
            case ["in"]:
                ip("-n", self._ends[1], "link", "set", f"v{self._ends[1]}", "up")
            case ["slow", rate]:  # both ways; tbf holds back what is over the rate
                return self._shape("tbf", "rate", rate, "burst", "16k", "latency", "400ms")
            case ["long", delay]:
                return self._shape("netem", "delay", delay)
            case ["quick"]:
                for end in self._ends:
                    self._tc(end, "del", "root")
        return True

    def _shape(self, *words: str) -> bool:
        return all(self._tc(end, "add", "root", *words) for end in self._ends)

    def _tc(self, end: str, verb: str, *words: str) -> bool:
        command = ["ip", "netns", "exec", end, "tc", "qdisc", verb, "dev", f"v{end}", *words]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def start_nodes(ends: tuple[str, str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """A raylet on each host; they stay in the foreground, so that they can be ended by their ids."""
    small = ["--num-cpus=4", f"--object-store-memory={100 * 2**20}", "--block", "--disable-usage-stats"]
    head = ["--head", f"--node-ip-address={HEAD}", "--port=6379", f"--temp-dir={folder}"]
    other = [f"--address={HEAD}:6379", f"--node-ip-address={OTHER}"]
    commands = [
        [*head, "--include-dashboard=false", '--resources={"here": 10}'],
        [*other, '--resources={"there": 10}'],
    ]
    processes = []
    for end, words in zip(ends, commands, strict=True):
        command = ["ip", "netns", "exec", end, "ray", "start", *words, *small]
        env = environment(folder)
        out = (folder / f"{end}.log").open("wb")
        processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))
        if end == ends[0]:
            wait_for_head(end)  # the other one looks for it once
    return processes


def wait_for_head(end: str) -> None:
    """Return once the head's port is open; raises TimeoutError."""
    look = f"import socket; socket.create_connection(('{HEAD}', 6379), 1)"
    for _ in range(120):
        command = ["ip", "netns", "exec", end, sys.executable, "-c", look]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return
        time.sleep(0.5)
    raise TimeoutError("the head did not start")


# Inside the head's namespace


def play(options: argparse.Namespace) -> None:
    """Deploy, keep asking, and have the cable pulled."""
    import ray
    from ray import serve

    from deployments.app import APP_NAME, assemble
    from deployments.settings import Place, Placement, Settings
    from tests.deployments.fake_engine import FakeEngine
    from tests.deployments.ray_client import wait_until

    for attempt in range(5):  # its port is open before the head is ready
        try:
            ray.init(f"{HEAD}:6379", log_to_driver=False, logging_level=logging.ERROR)
            break
        except ConnectionError:
            if attempt == 4:
                raise
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60)
    here, there = {"here": 0.1}, {"there": 0.1}
    placement = Placement(
        router=Place(num_cpus=0.1, resources=here),
        target=Place(num_cpus=0.1, resources=here),
        drafter=Place(num_cpus=0.1, resources=there),
    )
    settings = Settings(placement=placement, max_rows=ROWS, draft_timeout_s=1.0, cache_dir=None)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 18000})
    handle = serve.run(assemble(settings, FakeEngine(ROUND_S)), name=APP_NAME, route_prefix="/")
    asking = Asking(handle)
    router = serve.get_deployment_handle("Router", APP_NAME)
    steps = [("cable in", "", 6.0), ("cable out", "out", 6.0), ("in again", "in", 8.0)]
    steps += [("slow", f"slow {options.rate}", 8.0), ("quick again", "quick", 5.0)]
    steps += [("long", f"long {options.delay}", 8.0), ("short again", "quick", 5.0)]
    print(f"{'':12} {'rounds':>7} {'draft ms':>9} {'drafts a row-round':>19} {'failures':>9}", flush=True)
    for name, state, seconds in steps:
        if state:
            print(json.dumps({"cable": state}), flush=True)
            if not json.loads(sys.stdin.readline()):
                print(f"{name:12} {state}: not in this kernel", flush=True)
                continue
        before = figures(router)
        time.sleep(seconds)
        after = figures(router)
        rounds, draft, rows, drafted, failures = (a - b for a, b in zip(after, before, strict=True))
        print(
            f"{name:12} {rounds:7.0f} {1e3 * draft / max(rounds, 1):9.1f} {drafted / max(rows, 1):19.2f} "
            f"{failures:9.0f}",
            flush=True,
        )
    num, wrong = asking.end()
    print(f"{num} answers, {wrong} wrong or lost", flush=True)
    serve.shutdown()
    ray.shutdown()
    sys.exit(wrong > 0)


class Asking:
    """Requests one after another in several threads, each checked token by token."""

    def __init__(self, handle: Any):
        self._handle = handle
        self._is_over = threading.Event()
        self._ends: list[bool] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(ROWS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> tuple[int, int]:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return len(self._ends), self._ends.count(False)

    def _ask(self) -> None:
        from tests.deployments.ray_client import Client, generation

        while not self._is_over.is_set():
            client = Client(generation(max_tokens=240, deadline_s=120)).start(self._handle).join(150)
            if not client.is_complete:
                print(f"lost: {client.error!r}", flush=True)
            self._ends.append(client.is_complete)


def figures(router: Any) -> tuple[float, ...]:
    """Rounds, seconds of drafting, rows' rounds, drafts, failures of the exchange: all since the start."""
    (snapshot,) = cast(Any, router.options(method_name="snapshot").remote().result(timeout_s=30))
    draft = snapshot.histograms["dflash_round_seconds"].get(("draft",))
    values = snapshot.values
    names = ("vllm:spec_decode_num_draft_tokens_total", "dflash_exchange_failures_total")
    drafted, failures = (values[name].get((), 0.0) for name in names)
    rounds, rows = (values[f"dflash_{name}_total"].get((), 0.0) for name in ("rounds", "row_rounds"))
    return rounds, draft.sum if draft else 0.0, rows, drafted, failures


# Outside


def main() -> None:
    """Set all of it up, and take it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="400kbit", help="of the slow cable, as tc writes it")
    parser.add_argument("--delay", default="20ms", help="of the long cable, one way, as tc writes it")
    parser.add_argument("--inside", action="store_true", help="be the program on the head")
    options = parser.parse_args()
    if options.inside:
        play(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take all of it down
    folder = Path(tempfile.mkdtemp(prefix="dfh", dir="/tmp"))
    name = f"df{os.getpid() % 10000}"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        with two_namespaces(name) as ends:
            try:
                nodes = start_nodes(ends, folder)
                sys.exit(conduct(ends, folder, options))
            finally:
                for node in nodes:
                    end_group(node)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def conduct(ends: tuple[str, str], folder: Path, options: argparse.Namespace) -> int:
    """Run the program on the head, and move the cable as it says."""
    cable = Cable(ends)
    words = ["ip", "netns", "exec", ends[0], sys.executable, "-m", MODULE, "--inside"]
    words += ["--rate", options.rate, "--delay", options.delay]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=environment(folder), cwd=ROOT, **pipes)
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        if line.startswith('{"cable"'):
            is_done = cable.set(json.loads(line)["cable"])
            process.stdin.write(f"{json.dumps(is_done)}\n")
            process.stdin.flush()
        else:
            print(line, end="", flush=True)
    return process.wait()


def end_group(node: subprocess.Popen[bytes]) -> None:
    """A node and what it started: they share a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(node.pid, number)
        with suppress(subprocess.TimeoutExpired):
            node.wait(10)
            return


if __name__ == "__main__":
    main()
