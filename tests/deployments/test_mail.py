"""Letters to a window, apart from the request that sends them."""

import asyncio
import contextvars
from collections.abc import Awaitable

import pytest

from deployments import serve_stage
from deployments.messages import LastCall, Letter
from dflash_core.request import WindowId

REQUEST: contextvars.ContextVar[str | None] = contextvars.ContextVar("request", default=None)
WINDOW = WindowId("w")


class Box:
    """Notes the request in whose name it is called: Ray cancels the calls of a request with the request."""

    def __init__(self) -> None:
        self.senders: list[str | None] = []

    def put(self, window_id: WindowId, letter: Letter) -> Awaitable[None]:
        self.senders.append(REQUEST.get())
        return asyncio.sleep(0)

    def close(self, window_id: WindowId) -> Awaitable[None]:
        self.senders.append(REQUEST.get())
        return asyncio.sleep(0)


async def test_letters_are_in_nobodys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()
    monkeypatch.setattr(serve_stage.RemoteInbox, "start", lambda: box)
    stage = serve_stage.ServeStage(target=None)  # type: ignore[arg-type]
    token = REQUEST.set("a request that is about to be cancelled")
    stage.send(WINDOW, Letter(1, LastCall()))
    stage.forget(WINDOW)
    REQUEST.reset(token)
    await asyncio.sleep(0.01)
    assert box.senders == [None, None]
