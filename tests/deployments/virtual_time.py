"""An event loop whose clock jumps to the next timer: what happens never depends on the machine's load."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class _Jump(selectors.BaseSelector):
    """Never waits: the loop's own clock moves by as long as it would have waited."""

    def __init__(self) -> None:
        self.now = 0.0
        self._selector = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that could wake this loop")
        self.now += max(0.0, timeout)
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
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds that the loop would have slept so far."""
        return self._jump.now
