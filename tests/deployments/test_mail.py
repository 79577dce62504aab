"""Letters to a window, apart from the request that sends them."""

import asyncio
import contextvars
from collections.abc import Awaitable

import pytest

from deployments import serve_stage
from deployments.lanes import Standing
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


class Targets:
    """A handle to two targets, of which one is silent from some time on."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self._lane = ""

    def broadcast(self, method: str, router: str, num_waiting: int) -> "Targets":
        return self

    async def results_async(self, **_: object) -> list[object]:
        if self.silent:
            raise TimeoutError
        return [Standing("a"), Standing("b"), RuntimeError("a replica that dies")]

    def options(self, method_name: str, session_id: str) -> "Targets":
        one = Targets()
        one.silent, one._lane = self.silent, session_id
        return one

    async def remote(self, router: str, num_waiting: int) -> Standing:
        if self._lane in self.silent:
            await asyncio.sleep(60)
        return Standing(self._lane)


async def test_a_silent_target_keeps_no_other_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_stage.RemoteInbox, "start", lambda: Box())
    monkeypatch.setattr(serve_stage, "STATS_TIMEOUT_S", 0.05)
    targets = Targets()
    stage = serve_stage.ServeStage(targets)  # type: ignore[arg-type]
    assert {standing.lane for standing in await stage.standings("r", 0)} == {"a", "b"}
    targets.silent = {"a"}
    assert [standing.lane for standing in await stage.standings("r", 0)] == ["b"]
    targets.silent = {"b"}
    assert [standing.lane for standing in await stage.standings("r", 0)] == ["a"]
    targets.silent = set()
    assert {standing.lane for standing in await stage.standings("r", 0)} == {"a", "b"}
