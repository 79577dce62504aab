"""Every row of what must survive, played on a real application with real kills.

    python -m tests.faults                       all events, under ten minutes
    python -m tests.faults --only target,upgrade those whose name has one of these words

Prints a table; the exit code is 1 if a promise was broken, 130 if it was stopped. What it starts ends with
it.
"""

from tests.faults import alone  # noqa: F401

# isort: split

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tests.faults import clients, overload, replicas, upgrade
from tests.faults.application import Application, application
from tests.faults.report import Row, table
from tests.faults.traffic import References

Event = Callable[[Application, References], Awaitable[Row]]

# The last one leaves an application that takes nothing new.
EVENTS: dict[str, Event] = {
    "control": replicas.nothing,
    "drafter-dies": replicas.drafter_dies,
    "drafter-hangs": replicas.drafter_hangs,
    "drafters-die": replicas.drafters_die,
    "target-dies": replicas.target_dies,
    "targets-die": replicas.targets_die,
    "router-dies": replicas.router_dies,
    "clients-leave": clients.clients_leave,
    "readers-stall": clients.readers_stall,
    "row-fails": clients.row_fails,
    "bad-input": clients.bad_input,
    "overload": overload.overload,
    "upgrade": upgrade.upgrade,
    "drain": upgrade.draining,
}
LEFT_S = 60.0


async def play(app: Application, names: Sequence[str]) -> list[Row]:
    """The named events, one after the other; between two everything is whole, and nothing is left over."""
    rows: list[Row] = []
    references = await References.hear(app)
    for name in names:
        began = time.monotonic()
        row = await EVENTS[name](app, references)
        left = await asyncio.to_thread(app.await_nothing_left, LEFT_S)
        row.require(not left, f"left over: {left}")
        rows.append(row)
        print(f"{time.monotonic() - began:6.1f} s  {'  '.join(row.cells)}", flush=True)
        if name != "drain":
            whole = await asyncio.to_thread(app.await_whole, replicas.WHOLE_S)
            row.require(whole, "a replica was not replaced")
    return rows


async def until_stopped(app: Application, work: Awaitable[list[Row]]) -> list[Row] | None:
    """The work's rows, or None once a signal asks to stop."""
    working = asyncio.ensure_future(work)
    while not working.done() and not app.stop.is_set():
        await asyncio.wait({working}, timeout=0.2)
    if working.done():
        return working.result()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return None


def chosen(only: str) -> list[str]:
    """Names of events that have one of the words in them."""
    words = [word for word in only.split(",") if word]
    return [name for name in EVENTS if not words or any(word in name for word in words)]


def main() -> int:
    """Read the options, play, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="words of events' names, with commas between")
    options = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    began = time.monotonic()
    print(f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="dff", dir="/tmp") as folder,
        application(Path(folder, "cache")) as app,
    ):
        print(f"{time.monotonic() - began:6.1f} s  the application is up", flush=True)
        rows = asyncio.run(until_stopped(app, play(app, chosen(options.only))))
    if rows is None:
        return 130
    print(f"\n{table(rows)}\n\n{len(rows)} events, {time.monotonic() - began:.0f} s", flush=True)
    return int(any(row.misses for row in rows))


if __name__ == "__main__":
    sys.exit(main())
