"""The one thread of a replica that touches MLX: it loads, warms and computes.

The event loop beside it stays free, so health checks are answered while a round is computed. What is
called here runs in order; in between, the thread does its ``work`` (a target's rounds) as long as there
is any, and sleeps when there is none.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class MlxThread:
    """Runs calls, and a piece of work between them, on one thread for its whole life."""

    def __init__(self, name: str, work: Callable[[], bool] | None = None):
        """``work`` does one step and says whether there may be more to do."""
        self._work = work
        self._calls: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._condition = threading.Condition()
        self._is_awake = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"mlx-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call; safe from any thread."""
        future: Future[T] = Future()
        with self._condition:
            if self._is_stopping or self._failure is not None:
                raise RuntimeError("the MLX thread has ended") from self._failure
            self._calls.append((future, call))  # type: ignore[arg-type]
            self._condition.notify()
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call and wait for it without holding up the event loop."""
        return await asyncio.wrap_future(self.submit(call))

    def wake(self) -> None:
        """There is work again; safe from any thread."""
        with self._condition:
            self._is_awake = True
            self._condition.notify()

    def check(self) -> None:
        """Raise if the thread has died: the replica is then of no use."""
        if self._failure is not None or not self._thread.is_alive():
            raise RuntimeError("the MLX thread has died") from self._failure

    def stop(self) -> None:
        """End after the call under way; calls still queued are cancelled."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(timeout=10.0)

    def _main(self) -> None:
        try:
            while (call := self._next()) is not None:
                call()
        except BaseException as error:  # work that raises is a fault of ours: remember it for check()
            self._failure = error
        finally:
            with self._condition:
                for future, _ in self._calls:
                    future.cancel()
                self._calls.clear()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None when the thread shall end."""
        with self._condition:
            while not (self._calls or self._is_awake or self._is_stopping):
                self._condition.wait()
            if self._is_stopping:
                return None
            if self._calls:
                future, call = self._calls.popleft()
                return lambda: _settle(future, call)
            self._is_awake = False
            return self._do_work

    def _do_work(self) -> None:
        if self._work is not None and self._work():
            self.wake()


def _settle(future: "Future[object]", call: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
