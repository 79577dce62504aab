"""Nodes of Ray as processes: waited for, and ended with all that they began."""

import contextlib
import signal
import subprocess
import time
import urllib.error
from typing import Any

import psutil


def end(process: subprocess.Popen[bytes], folder: str) -> None:
    """End the node and whatever of it is left: its processes name its folder, or descend from it."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    for other in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in other.info["cmdline"] or ()):
            children.append(other)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


def wait_for(ask: Any, timeout_s: float) -> Any:
    """Repeat until it raises nothing and says yes."""
    until = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < until:
        try:
            if last := ask():
                return last
        except (OSError, urllib.error.URLError) as failure:
            last = failure
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s} s: {last}")
