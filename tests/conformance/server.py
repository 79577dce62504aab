"""The server under test: ``dflash-serve up`` on free ports, in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dflash_core.pair

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is and what it serves."""

    url: str
    model: str
    target: Path  # folder with the tokenizer


@contextmanager
def serving(log: Path, url: str | None) -> Iterator[Server]:
    """Start the embedded pair, or use the server at ``url``."""
    target = Path(dflash_core.pair.__file__).parent / "target"
    if url is not None:
        yield Server(url.rstrip("/"), "demo", target)
        return
    port, grpc_port = _free_port(), _free_port()
    command = [str(Path(sys.executable).parent / "dflash-serve"), "up"]
    command += ["--http-port", str(port), "--grpc-port", str(grpc_port)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", "demo", target)
    try:
        _wait(server.url, process, log)
        yield server
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server did not start; its output is in {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if json.load(answer)["status"] == "ok":
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:g} s; its output is in {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
