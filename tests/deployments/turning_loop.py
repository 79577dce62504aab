"""An event loop for a ``RemoteDrafter``'s calls that runs only while it is asked something.

What a call may do at once is done before the caller goes on; what waits for time to pass waits until the test
lets it pass. So what happens never depends on the machine's load, nor on a thread's.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.deployments.virtual_time import VirtualTimeLoop

TURNS = 20  # more than any call takes that waits for nothing


class TurningLoop(VirtualTimeLoop):
    """Turns in a thread of its own, while the caller waits for it: a loop must not run inside another."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        self.pass_time(0.0)
        return handle

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass for what waits, and all be done that is due."""

        async def turn() -> None:
            await asyncio.sleep(seconds)
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self._thread.submit(self.run_until_complete, turn()).result()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()
