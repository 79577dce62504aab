"""An event loop on a core of its own, whatever else the machine does.

Its clock stands still while other processes have the core: it goes by this thread's CPU time, and over a wait
it jumps. What happens in it is therefore as late as it would be on an idle machine of this kind.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from tests.deployments.virtual_time import Jump


class CpuTimeLoop(asyncio.SelectorEventLoop):
    """Sockets to other processes have no place in it: their clock is another."""

    def __init__(self) -> None:
        self._jump = Jump()
        self._foreign_s = 0.0
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds of computing and of waiting."""
        return time.thread_time() - self._foreign_s + self._jump.jumped

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Here and now: a thread would share the interpreter with this one, and its time would not count."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def excuse(self, seconds: float) -> None:
        """What was computed for so long would have been computed elsewhere."""
        self._foreign_s += seconds
