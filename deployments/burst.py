"""The router's side of a burst window: one streaming call, the rows in it, and mail to whoever plays it."""

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
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
    Returned,
)
from deployments.ticket import Ticket
from deployments.view import NUM_ROUNDS, RoundTrace, WindowView
from dflash_core.request import RowId, WindowId

logger = logging.getLogger("dflash.router")


class Stage(Protocol):
    """Where windows are played: target replicas and the way to reach the one that plays a window."""

    @property
    def is_anywhere_open(self) -> bool:
        """Whether a window may be opened while no lane is known by name."""
        ...

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
        on_open: Callable[["BurstWindow", Opened], None],
        on_round: Callable[["BurstWindow", Played], None],
        on_over: Callable[["BurstWindow", Closed | Refused | None], None],
        on_return: Callable[["BurstWindow", Ticket, Returned], None] = lambda window, ticket, returned: None,
        lane: str = "",
        may_go_on: Callable[["BurstWindow"], bool] = lambda window: False,
    ):
        self.window_id = window_id
        self.lane = lane  # that it is meant for, then the one that it is on
        self.tickets: dict[RowId, Ticket] = {}
        self.is_joinable = True
        self.was_opened = False  # whether a replica took it
        self._stage = stage
        self._on_open = on_open
        self._on_round = on_round
        self._on_over = on_over
        self._rounds: deque[RoundTrace] = deque(maxlen=NUM_ROUNDS)
        self._on_return = on_return
        self._may_go_on = may_go_on
        self._called_at = 0.0  # by the event loop's clock
        self._max_age_s = 0.0
        self._first: list[Letter] = []  # what the opening call carries
        self._num_letters = 0
        self._unacknowledged: dict[int, Ticket] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self, max_age_s: float) -> None:
        """Make the opening call with the rows that have joined by now, once.

        That time after a replica took it joins end, unless there are rows and the lane still takes new ones:
        rows of a window that runs out and of its successor would be played in two rounds instead of one.
        """
        if self._task is not None:
            return
        opening = Opening(self.window_id, tuple(self._first), self.lane)
        loop = asyncio.get_running_loop()
        # A context of its own: Serve would cancel the call with the client whose request opened it.
        answers = self._stage.play(opening)  # from here on the stage knows where mail for this window goes
        self._task = loop.create_task(self._run(answers), context=contextvars.Context())
        self._called_at, self._max_age_s = loop.time(), max_age_s

    @property
    def called_s(self) -> float:
        """Seconds since the opening call."""
        return asyncio.get_running_loop().time() - self._called_at

    def join(self, ticket: Ticket) -> None:
        """A row joins a window that is still to open, opening, or open."""
        letter = self._admission(ticket)
        if self._task is None:
            self._first.append(letter)
        else:
            self._stage.send(self.window_id, letter)

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

    def take_back(self) -> Sequence[Ticket]:
        """Give up a call that no replica has taken; the rows that were to go with it."""
        self.cancel()
        self._stage.forget(self.window_id)
        tickets = tuple(self.tickets.values())
        self.tickets.clear()
        return tickets

    def view(self) -> WindowView:
        """The window as it stands, with its last rounds."""
        rounds = tuple(self._rounds)
        return WindowView(self.window_id, self.lane, self.is_joinable, len(self.tickets), rounds)

    def _age(self) -> None:
        asyncio.get_running_loop().call_later(self._max_age_s, self._grow_old)

    def _grow_old(self) -> None:
        if self.is_joinable and self.tickets and self._may_go_on(self):
            self._age()
        else:
            self.last_call()

    def _admission(self, ticket: Ticket) -> Letter:
        self.tickets[ticket.row_id] = ticket
        letter = self._letter(Admit(ticket.row_request(), ticket.generation.via))
        self._unacknowledged[letter.number] = ticket
        return letter

    def _letter(self, command: Command) -> Letter:
        self._num_letters += 1
        return Letter(self._num_letters, command)

    async def _run(self, answers: AsyncGenerator[Answer, None]) -> None:
        ending: Closed | Refused | None = None
        try:
            async with aclosing(answers):
                async for answer in answers:
                    match answer:
                        case Played():
                            self._take(answer)
                        case Opened():
                            self.lane, self.was_opened = answer.lane, True
                            self._age()
                            self._on_open(self, answer)
                        case Returned():
                            self._give_back(answer)
                        case Closed() | Refused():
                            ending = answer
        except Exception as error:  # the replica died, or Serve could not reach it
            told = {"window": self.window_id}
            logger.warning(
                "window %s broke off: %s: %s", self.window_id, type(error).__name__, error, extra=told
            )
        finally:
            self.is_joinable = False
            self._stage.forget(self.window_id)
        if isinstance(ending, Closed) and ending.reason == "inbox_lost":
            await self._stage.mend()
        self._on_over(self, ending)

    def _take(self, played: Played) -> None:
        """Hand each row its part; those that ended leave the window."""
        self._acknowledge(played)
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
        self._on_round(self, played)

    def _acknowledge(self, played: Played) -> None:
        """Rows whose letters were carried out have their places; so have those that got on."""
        if not self._unacknowledged:
            return
        moving = {row.row_id for row in played.report.rows}
        for number, ticket in list(self._unacknowledged.items()):
            if number <= played.acknowledged or ticket.row_id in moving:
                del self._unacknowledged[number]
                if not ticket.is_over:
                    ticket.has_started = True
                    ticket.events.put_nowait(Started(self.window_id, self.lane, ticket.waited_s))

    def _give_back(self, returned: Returned) -> None:
        ticket = self.tickets.pop(returned.row_id, None)
        if ticket is None:  # left already
            return
        for number in [n for n, waiting in self._unacknowledged.items() if waiting is ticket]:
            del self._unacknowledged[number]
        self._on_return(self, ticket, returned)
