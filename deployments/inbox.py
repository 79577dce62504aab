"""Mail from a router replica to whichever replica plays a window.

Serve's routing cannot reach "the replica that holds window w" (after a scale-up, during an upgrade or on
a full replica it picks another one), so joins and leaves go through this small actor. The router owns
it: it lives and dies with its router.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Protocol

import ray

from deployments.messages import Command
from dflash_core.request import WindowId

Batch = tuple[Command, ...]


class Inbox:
    """One mailbox per window. Mail may come before its reader does."""

    def __init__(self) -> None:
        self._boxes: dict[WindowId, asyncio.Queue[Command | None]] = {}

    async def put(self, window_id: WindowId, *commands: Command) -> None:
        """Leave commands for a window, in order."""
        box = self._box(window_id)
        for command in commands:
            box.put_nowait(command)

    async def take(self, window_id: WindowId) -> AsyncGenerator[Batch, None]:
        """Commands as they come, until ``close``."""
        box = self._box(window_id)
        try:
            while (command := await box.get()) is not None:
                yield _with_rest(command, box)
        finally:  # a reader that comes after ``close`` must not leave a box behind
            if self._boxes.get(window_id) is box:
                del self._boxes[window_id]

    async def close(self, window_id: WindowId) -> None:
        """The window is over: end its reader and forget its mail."""
        box = self._boxes.pop(window_id, None)
        if box is not None:
            box.put_nowait(None)

    async def num_boxes(self) -> int:
        """Windows that have a box; for tests of leaks."""
        return len(self._boxes)

    def _box(self, window_id: WindowId) -> "asyncio.Queue[Command | None]":
        return self._boxes.setdefault(window_id, asyncio.Queue())


def _with_rest(first: Command, box: "asyncio.Queue[Command | None]") -> Batch:
    """The first command and what already waits behind it, short of the end mark."""
    batch = [first]
    while not box.empty():
        command = box.get_nowait()
        if command is None:
            box.put_nowait(None)
            break
        batch.append(command)
    return tuple(batch)


class Mailbox(Protocol):
    """What a target needs of an inbox: a stream of batches that ends, or raises if the inbox is lost."""

    def take(self, window_id: WindowId) -> AsyncGenerator[Batch, None]:
        """Commands of a window as they come."""
        ...


class RemoteInbox:
    """An inbox in its own actor. Goes into the opening call, so it pickles as the actor's handle."""

    def __init__(self, actor: Any):
        self._actor = actor

    @classmethod
    def start(cls) -> "RemoteInbox":
        """Start the actor, owned by this process."""
        actor = ray.remote(Inbox).options(num_cpus=0, max_concurrency=1000).remote()
        return cls(actor)

    def put(self, window_id: WindowId, command: Command) -> Awaitable[None]:
        """Send a command; calls are carried out in order. The result is for those who must know."""
        return self._actor.put.remote(window_id, command)

    def close(self, window_id: WindowId) -> Awaitable[None]:
        """End a window's reader and forget its mail."""
        return self._actor.close.remote(window_id)

    async def num_boxes(self) -> int:
        """Windows that have a box."""
        return await self._actor.num_boxes.remote()

    async def take(self, window_id: WindowId) -> AsyncGenerator[Batch, None]:
        """Commands as they come; raises ``ray.exceptions.RayError`` when the actor is lost."""
        stream = self._actor.take.options(num_returns="streaming").remote(window_id)
        try:
            async for ref in stream:
                yield await ref
        finally:
            ray.cancel(stream)
