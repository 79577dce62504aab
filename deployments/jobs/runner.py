"""Plays a batch: a number of requests in flight, every result into the journal, until the end or a stop."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.jobs.client import Client, GaveUp, Reach, connected
from deployments.jobs.journal import Journal
from deployments.jobs.progress import Progress, Tally
from deployments.jobs.requests import BadLine, Line
from deployments.jobs.results import Result, of_failure, of_reply

_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done."""

    lines: Iterator[Line]  # those without a result; read as they are needed
    reach: Reach
    in_flight: int


async def run(work: Work, journal: Journal, tally: Tally, progress: Progress, stop: threading.Event) -> bool:
    """Answer the lines; return whether all have their result, false after a stop.

    A stop ends the requests in flight (their rows are gone by the next round); results that came are
    written. Raises OSError if the input cannot be read or the output not be written.
    """
    writer = Writer(journal, tally)
    writing = asyncio.create_task(writer.run())
    playing = asyncio.create_task(_play(work, writer))
    try:
        while not playing.done() and not writing.done() and not stop.is_set():
            await asyncio.wait({playing, writing}, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            progress.show()
    finally:
        playing.cancel()
        await asyncio.wait({playing})
        writer.end()
        await writing
    if playing.cancelled():
        return False
    playing.result()
    return True


async def _play(work: Work, writer: "Writer") -> None:
    lines = Lines(work.lines)
    try:
        async with connected(work.reach) as client, asyncio.TaskGroup() as group:
            for _ in range(work.in_flight):
                group.create_task(_answer_some(lines, client, writer))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _answer_some(lines: "Lines", client: Client, writer: "Writer") -> None:
    while (line := await lines.next()) is not None:
        writer.put(await _answer(line, client))


async def _answer(line: Line, client: Client) -> Result:
    if isinstance(line, BadLine):
        return of_failure(line, line.code, line.message)
    try:
        return of_reply(line, await client.ask(line))
    except GaveUp as error:
        return of_failure(line, error.code, str(error))


class Lines:
    """An iterator that many tasks draw from; a read that blocks runs on a thread."""

    def __init__(self, lines: Iterator[Line]):
        self._lines = lines
        self._turn = asyncio.Lock()

    async def next(self) -> Line | None:
        """The next line, None after the last."""
        async with self._turn:
            return await asyncio.to_thread(next, self._lines, None)


class Writer:
    """Takes results from many tasks and writes them in turn, on a thread."""

    def __init__(self, journal: Journal, tally: Tally):
        self._journal = journal
        self._tally = tally
        self._waiting: list[Result] = []
        self._has_news = asyncio.Event()
        self._is_over = asyncio.Event()

    def put(self, result: Result) -> None:
        """Count this one, and write it soon."""
        self._tally.add(result)
        self._waiting.append(result)
        self._has_news.set()

    def end(self) -> None:
        """No more will come: write what waits, and return from ``run``."""
        self._is_over.set()
        self._has_news.set()

    async def run(self) -> None:
        """Write until the end. Raises OSError."""
        while self._waiting or not self._is_over.is_set():
            await self._has_news.wait()
            self._has_news.clear()
            if self._journal.period_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), self._journal.period_s)
            batch, self._waiting = self._waiting, []
            if batch:
                await asyncio.to_thread(self._journal.append, batch)
