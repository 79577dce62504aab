"""Mail from a router replica to whichever replica plays a window.

Serve's routing cannot reach "the replica that holds window w" (after a scale-up, during an upgrade or on
a full replica it picks another one), so joins and leaves go through this small actor. The router owns
it: it lives and dies with its router.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Protocol

import ray

from deployments.messages import Letter
from dflash_core.request import WindowId

NAMESPACE = "dflash"
NAME_PREFIX = "inbox-"

Batch = tuple[Letter, ...]


class _Box:
    """Letters of one window, given out in the order of their numbers."""

    def __init__(self) -> None:
        self._letters: dict[int, Letter] = {}
        self._news = asyncio.Event()
        self._is_closed = False

    def put(self, letter: Letter) -> None:
        self._letters[letter.number] = letter
        self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    async def read(self, after: int) -> AsyncGenerator[Batch, None]:
        while not self._is_closed:
            batch: list[Letter] = []
            while (letter := self._letters.pop(after + 1, None)) is not None:
                batch.append(letter)
                after = letter.number
            if batch:
                yield tuple(batch)
            else:
                self._news.clear()
                await self._news.wait()


class Inbox:
    """One box per window. Mail may come before its reader does."""

    def __init__(self) -> None:
        self._boxes: dict[WindowId, _Box] = {}

    async def put(self, window_id: WindowId, letter: Letter) -> None:
        """Leave a letter for a window."""
        self._boxes.setdefault(window_id, _Box()).put(letter)

    async def take(self, window_id: WindowId, after: int) -> AsyncGenerator[Batch, None]:
        """Letters in order, those with numbers up to ``after`` left out, until ``close``."""
        box = self._boxes.setdefault(window_id, _Box())
        try:
            async for batch in box.read(after):
                yield batch
        finally:  # a reader that comes after ``close`` must not leave a box behind
            if self._boxes.get(window_id) is box:
                del self._boxes[window_id]

    async def close(self, window_id: WindowId) -> None:
        """The window is over: end its reader and forget its mail."""
        box = self._boxes.pop(window_id, None)
        if box is not None:
            box.close()

    async def num_boxes(self) -> int:
        """Windows that have a box; for tests of leaks."""
        return len(self._boxes)


class Mailbox(Protocol):
    """What a target needs of an inbox: a stream of batches that ends, or raises if the inbox is lost."""

    def take(self, window_id: WindowId, after: int) -> AsyncGenerator[Batch, None]:
        """Letters of a window as they come, from number ``after + 1`` on."""
        ...


class RemoteInbox:
    """An inbox in its own actor. Goes into the opening call, so it pickles as the actor's handle."""

    def __init__(self, actor: Any):
        self._actor = actor

    @classmethod
    def start(cls) -> "RemoteInbox":
        """Start the actor, owned by this process."""
        name = (
            f"{NAME_PREFIX}{uuid.uuid4().hex[:12]}"  # to find it by; it dies with this process all the same
        )
        options = {"num_cpus": 0, "max_concurrency": 1000, "name": name, "namespace": NAMESPACE}
        actor = ray.remote(Inbox).options(**options).remote()
        return cls(actor)

    def put(self, window_id: WindowId, letter: Letter) -> Awaitable[None]:
        """Send a letter. The result is for those who must know."""
        return self._actor.put.remote(window_id, letter)

    def close(self, window_id: WindowId) -> Awaitable[None]:
        """End a window's reader and forget its mail."""
        return self._actor.close.remote(window_id)

    async def num_boxes(self) -> int:
        """Windows that have a box."""
        return await self._actor.num_boxes.remote()

    async def take(self, window_id: WindowId, after: int) -> AsyncGenerator[Batch, None]:
        """Letters as they come; raises ``ray.exceptions.RayError`` when the actor is lost."""
        stream = self._actor.take.options(num_returns="streaming").remote(window_id, after)
        try:
            async for ref in stream:
                yield await ref
        finally:
            ray.cancel(stream)
