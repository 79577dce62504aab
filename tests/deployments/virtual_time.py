"""An event loop whose clock jumps to the next timer: what happens never depends on the machine's load."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class Jump(selectors.BaseSelector):
    """Looks for what is ready, and jumps to the next timer where nothing is: the loop never waits."""

    def __init__(self) -> None:
        self.jumped = 0.0
        self._selector = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that could wake this loop")
        self.jumped += max(0.0, timeout)
        return self._selector.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def close(self) -> None:
        self._selector.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """One that sleeps for no time at all; threads and sockets have no place in it."""

    def __init__(self) -> None:
        self._jump = Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds that the loop would have slept so far."""
        return self._jump.jumped
