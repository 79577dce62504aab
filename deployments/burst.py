"""The router's side of a burst window: one streaming call, the rows in it, and mail to whoever plays it."""

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from deployments.generation import Started
from deployments.messages import (
    Admit,
    Answer,
    Closed,
    Command,
    LastCall,
    Letter,
    Opened,
    Opening,
    Played,
    Refused,
    Retire,
)
from deployments.ticket import Ticket
from deployments.view import NUM_ROUNDS, RoundTrace, WindowView
from dflash_core.request import RowId, WindowId

logger = logging.getLogger("dflash.router")


class Stage(Protocol):
    """Where windows are played: target replicas and the way to reach the one that plays a window."""

    def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        """Open a window on some replica."""
        ...

    def send(self, window_id: WindowId, letter: Letter) -> None:
        """Mail to the replica that plays it."""
        ...

    def forget(self, window_id: WindowId) -> None:
        """The window is over."""
        ...

    async def mend(self) -> None:
        """Mail did not get through: make sure that the next window's will."""
        ...


class BurstWindow:
    """Rows that share a window, from its opening call to its end."""

    def __init__(
        self,
        window_id: WindowId,
        stage: Stage,
        on_open: Callable[[Opened], None],
        on_round: Callable[[Played], None],
        on_over: Callable[["BurstWindow", Closed | Refused | None], None],
    ):
        self.window_id = window_id
        self.lane = ""
        self.tickets: dict[RowId, Ticket] = {}
        self.is_joinable = True
        self._stage = stage
        self._on_open = on_open
        self._on_round = on_round
        self._on_over = on_over
        self._rounds: deque[RoundTrace] = deque(maxlen=NUM_ROUNDS)
        self._num_letters = 0
        self._unacknowledged: dict[int, Ticket] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self, tickets: list[Ticket], max_age_s: float) -> None:
        """Make the opening call with the first rows; joins end after ``max_age_s``."""
        opening = Opening(self.window_id, tuple(self._admission(ticket) for ticket in tickets))
        loop = asyncio.get_running_loop()
        # A context of its own: Serve would cancel the call with the client whose request opened it.
        self._task = loop.create_task(self._run(opening), context=contextvars.Context())
        loop.call_later(max_age_s, self.last_call)

    def join(self, ticket: Ticket) -> None:
        """A row joins a window that is open, or opening."""
        self._stage.send(self.window_id, self._admission(ticket))

    def retire(self, ticket: Ticket) -> None:
        """A row leaves before its end."""
        if self.tickets.pop(ticket.row_id, None) is not None:
            self._stage.send(self.window_id, self._letter(Retire(ticket.row_id)))

    def last_call(self) -> None:
        """No more joins; the window ends with its last row."""
        if self.is_joinable:
            self.is_joinable = False
            self._stage.send(self.window_id, self._letter(LastCall()))

    def cancel(self) -> None:
        """Give up the call; the target frees the window."""
        if self._task is not None:
            self._task.cancel()

    def view(self) -> WindowView:
        """The window as it stands, with its last rounds."""
        rounds = tuple(self._rounds)
        return WindowView(self.window_id, self.lane, self.is_joinable, len(self.tickets), rounds)

    def _admission(self, ticket: Ticket) -> Letter:
        self.tickets[ticket.row_id] = ticket
        letter = self._letter(Admit(ticket.row_request()))
        self._unacknowledged[letter.number] = ticket
        return letter

    def _letter(self, command: Command) -> Letter:
        self._num_letters += 1
        return Letter(self._num_letters, command)

    async def _run(self, opening: Opening) -> None:
        ending: Closed | Refused | None = None
        try:
            async with aclosing(self._stage.play(opening)) as answers:
                async for answer in answers:
                    match answer:
                        case Played():
                            self._take(answer)
                        case Opened():
                            self.lane = answer.lane
                            self._on_open(answer)
                        case Closed() | Refused():
                            ending = answer
        except Exception as error:  # the replica died, or Serve could not reach it
            logger.warning("window %s broke off: %s: %s", self.window_id, type(error).__name__, error)
        finally:
            self.is_joinable = False
            self._stage.forget(self.window_id)
        if isinstance(ending, Closed) and ending.reason == "inbox_lost":
            await self._stage.mend()
        self._on_over(self, ending)

    def _take(self, played: Played) -> None:
        """Hand each row its part; those that ended leave the window."""
        self._acknowledge(played.acknowledged)
        if played.report.live_rows:
            self._rounds.append(RoundTrace.of(played.report))
        now = time.monotonic()
        for number, row in enumerate(played.report.rows):
            ticket = self.tickets.get(row.row_id)
            if ticket is None:  # left already; the target has not heard of it yet
                continue
            ticket.take(row, now, width=played.report.width if number < played.report.live_rows else 0)
            if row.finish is not None:
                del self.tickets[row.row_id]
            elif ticket.is_over:  # a stop string, which the target cannot see
                self.retire(ticket)
        self._on_round(played)

    def _acknowledge(self, last: int) -> None:
        for number in [n for n in self._unacknowledged if n <= last]:
            ticket = self._unacknowledged.pop(number)
            if not ticket.is_over:
                ticket.events.put_nowait(Started(self.window_id, self.lane))
