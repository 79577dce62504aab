"""An event loop on a core of its own, whatever else the machine does.

Its clock stands still while other processes have the core: it goes by this thread's CPU time, and over a wait
it jumps. What happens in it is therefore as late as it would be on an idle machine of this kind.
"""

import asyncio
import selectors
import time
from collections.abc import Mapping
from typing import Any


class _Jump(selectors.BaseSelector):
    """Looks for what is ready, and jumps to the next timer where nothing is."""

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


class CpuTimeLoop(asyncio.SelectorEventLoop):
    """Sockets to other processes have no place in it: their clock is another."""

    def __init__(self) -> None:
        self._jump = _Jump()
        self._foreign_s = 0.0
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds of computing and of waiting."""
        return time.thread_time() - self._foreign_s + self._jump.jumped

    def excuse(self, seconds: float) -> None:
        """What was computed for so long would have been computed elsewhere."""
        self._foreign_s += seconds
