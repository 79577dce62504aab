"""Reads a backend's events in a task of its own, so that waiting for the next may time out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from deployments.generation import Ended, Event

_RETURN_S = 1.0  # what a generator may take to return after its last event


class EventReader:
    """``async with EventReader(events) as reader``; leaving it closes the generator, however far it got.

    The generator lives in one task from first to last event, so it may use timeouts and cancel scopes
    around its yields.
    """

    def __init__(self, events: AsyncGenerator[Event, None], num_choices: int = 1):
        self._events = events
        self._num_open = num_choices
        # A client that reads slowly holds back its own generator, not its neighbours.
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=4)
        self._task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the last event was read."""
        return self._num_open == 0

    async def __aenter__(self) -> "EventReader":
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is None:
            return
        if self.has_ended:  # let the generator return by itself
            await asyncio.wait({self._task}, timeout=_RETURN_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def next(self, timeout: float | None = None) -> Event | None:
        """Return the next event, or None if there was none in time; raise what the backend raised."""
        # Not wait_for: below Python 3.12 it loses a cancellation that meets a ready item.
        try:
            async with asyncio.timeout(timeout):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, Exception):
            raise item
        self._num_open -= isinstance(item, Ended)
        return item

    async def _read(self) -> None:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    await self._queue.put(event)
            # Nobody reads on after the event named Ended; whoever does has been let down.
            await self._queue.put(RuntimeError("the backend's events stopped without an end"))
        except Exception as error:
            await self._queue.put(error)
