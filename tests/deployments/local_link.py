"""Drafter sessions in this process behind a plain link, which the tests break in every way they like."""

import asyncio
from concurrent.futures import Future

from deployments.exchange.messages import DraftCall, DraftReply
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.sessions import Sessions
from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest, WindowId
from tests.deployments.fake_engine import FakeDrafter, FakeWindow

W = WindowId("w")


class LocalLink:
    """Calls go straight to the sessions; the tests break it in every way they like."""

    def __init__(self) -> None:
        self.sessions = Sessions(FakeDrafter(), "fake", ttl_s=60.0)
        self.calls: list[DraftCall] = []
        self.is_dead = False
        self.delay_s = 0.0
        self.held: asyncio.Event | None = None  # set: answers wait for it

    def restart(self) -> None:
        self.sessions = Sessions(FakeDrafter(), "fake", ttl_s=60.0)
        self.is_dead = False

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        self.calls.append(call)
        self._check()
        reply = self.sessions.draft(call)
        await asyncio.sleep(self.delay_s)
        if self.held is not None:
            await self.held.wait()
        return reply

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        self._check()
        if self.held is not None:
            await self.held.wait()
        return self.sessions.lengths(window_id)

    async def close(self, window_id: WindowId) -> None:
        self.sessions.close(window_id)

    def _check(self) -> None:
        if self.is_dead:
            raise ConnectionError("no drafter")


def settle(drafter: RemoteDrafter, window: FakeWindow) -> None:
    """Wait until a ping under way has its answer."""
    ping: Future | None = drafter._windows[W].ping
    if ping is not None:
        ping.result(5)


def row(name: str, length: int = 5, max_tokens: int = 400) -> RowRequest:
    return RowRequest(RowId(name), tuple(range(len(name), len(name) + length)), max_tokens)


def play(window: FakeWindow, rounds: int) -> list[RoundReport]:
    return [window.step() for _ in range(rounds)]


def tokens(reports: list[RoundReport], name: str) -> list[int]:
    return [t for report in reports for r in report.rows if r.row_id == name for t in r.tokens]
