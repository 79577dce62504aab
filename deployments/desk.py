"""The router's desk: a bounded queue of requests, and the windows that they are played in.

Runs on one event loop without locks: whatever changes who waits or who plays ends in ``_schedule``.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable

from deployments.burst import BurstWindow, Stage
from deployments.generation import Ended, Event, Generation
from deployments.messages import Closed, Opened, Played, Refused, Traffic
from deployments.telemetry import Statistics
from deployments.ticket import Ticket
from deployments.view import WindowView
from dflash_core.errors import DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from dflash_core.request import WindowId
from dflash_core.text.stream import TextStream

logger = logging.getLogger("dflash.router")

FIRST_PAUSE_S = 0.05  # after a refusal or a lost window, before the next opening call
LONGEST_PAUSE_S = 1.0


class Desk:
    """Takes generations in and gives events out."""

    def __init__(
        self,
        stage: Stage,
        statistics: Statistics,
        new_text: Callable[[Generation], TextStream],
        eos_token_ids: frozenset[int],
        *,
        max_rows: int = 16,
        max_windows: int = 1,
        max_queue: int = 64,
        window_max_age_s: float = 30.0,
    ):
        self.traffic = Traffic()
        self._stage = stage
        self._statistics = statistics
        self._new_text = new_text
        self._eos_token_ids = eos_token_ids
        self._max_rows = max_rows
        self._max_windows = max_windows
        self._max_queue = max_queue
        self._window_max_age_s = window_max_age_s
        self._waiting: deque[Ticket] = deque()
        self._windows: list[BurstWindow] = []
        self._pause_s = 0.0
        self._is_pausing = False
        self._is_closed = False
        self._is_draining = False
        self._mean_seconds = 2.0  # of recent requests, from admission to end

    @property
    def num_waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a place in a window."""
        return sum(len(window.tickets) for window in self._windows)

    @property
    def num_windows(self) -> int:
        """Windows open, those that run out included."""
        return len(self._windows)

    def view(self) -> tuple[WindowView, ...]:
        """The open windows."""
        return tuple(window.view() for window in self._windows)

    async def play(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Play a request; closing the generator takes its row out before the next round."""
        tickets, events = self._enter(generation)
        timer = asyncio.get_running_loop().call_later(
            generation.deadline_s, self._expire, tickets, generation
        )
        reason = "abort"
        try:
            while tickets:
                event = await events.get()
                if isinstance(event, Exception):
                    reason = "error"
                    raise event
                if isinstance(event, Ended):  # that choice is done; others may still play
                    self._leave(tickets.pop(event.index), event.finish_reason)
                yield event
        finally:
            timer.cancel()
            for ticket in tickets.values():
                self._leave(ticket, reason)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused from now on."""
        return self._is_draining

    def drain(self) -> int:
        """Take nothing new from now on; the number of requests that are not over."""
        self._is_draining = True
        return self.num_waiting + self.num_running

    def close(self) -> None:
        """End everything; for a replica that stops."""
        self._is_closed = True
        for window in self._windows:
            window.cancel()

    def _enter(self, generation: Generation) -> tuple[dict[int, Ticket], "asyncio.Queue[Event | Exception]"]:
        """A ticket for each choice, side by side in the queue so that they share a window if it has room.

        All of them or none.
        """
        if self._is_closed or self._is_draining:
            raise Unavailable("the server is shutting down; try again in a moment")
        most = self._max_queue + self._max_rows * self._max_windows
        if generation.num_choices > most:
            raise InvalidRequest(f"this server has room for at most {most} choices of a request", param="n")
        tickets = {index: self._new_ticket(generation, index) for index in range(generation.num_choices)}
        events = tickets[0].events
        for ticket in tickets.values():
            ticket.events = events
        num_before = len(self._waiting)
        self._waiting.extend(tickets.values())
        if len(self._waiting) - self._num_places() > self._max_queue:
            for ticket in tickets.values():
                self._waiting.remove(ticket)
            raise QueueFull(
                f"{num_before} answers are waiting already; try again later",
                retry_after=self._expected_wait_s(),
            )
        self._schedule()
        return tickets, events

    def _new_ticket(self, generation: Generation, index: int) -> Ticket:
        text, now = self._new_text(generation), time.monotonic()
        return Ticket(generation, text, self._eos_token_ids, now, self._statistics, index)

    def _num_places(self) -> int:
        """Rows that could be placed at once: in windows that take joins, and in those still to open."""
        if self._is_pausing:
            return 0
        joinable = [window for window in self._windows if window.is_joinable]
        unopened = max(0, self._max_windows - len(joinable))
        return sum(max(0, self._room(window)) for window in joinable) + unopened * self._max_rows

    def _expected_wait_s(self) -> float:
        """When about half of the queue should have found a place."""
        rows = self._max_rows * self._max_windows
        return max(1.0, round(self._mean_seconds * (len(self._waiting) + rows) / (2 * rows), 1))

    def _leave(self, ticket: Ticket, reason: str) -> None:
        ticket.is_over = True
        now = time.monotonic()
        with contextlib.suppress(ValueError):
            self._waiting.remove(ticket)
        for window in self._windows:
            window.retire(ticket)
        first = ticket.first_token_at
        self._statistics.observe_finished(
            reason if reason in ("stop", "length", "abort") else "error",
            now - ticket.arrived,
            first_token_seconds=None if first is None else first - ticket.arrived,
            completion_tokens=len(ticket.committed),
        )
        if reason in ("stop", "length"):
            self._mean_seconds += 0.1 * (now - ticket.arrived - self._mean_seconds)
        self._schedule()

    def _expire(self, tickets: dict[int, Ticket], generation: Generation) -> None:
        for ticket in tickets.values():
            ticket.fail(DeadlineExceeded(f"not finished within {generation.deadline_s:g} seconds"))

    def _schedule(self) -> None:
        """Give places to whoever waits longest; open a window when there is none with room."""
        while self._waiting and not self._is_pausing and not self._is_closed:
            window = next((w for w in self._windows if w.is_joinable and self._room(w) > 0), None)
            if window is not None:
                window.join(self._next_ticket())
            elif sum(w.is_joinable for w in self._windows) < self._max_windows:
                self._open_window()
            else:
                break
        self._statistics.observe_waiting(self.num_waiting)
        self._statistics.observe_running(self.num_running)

    def _room(self, window: BurstWindow) -> int:
        return self._max_rows - len(window.tickets)

    def _next_ticket(self) -> Ticket:
        ticket = self._waiting.popleft()
        if not ticket.was_admitted:
            ticket.was_admitted = True
            prompt_tokens = len(ticket.generation.prompt_ids)
            self._statistics.observe_admitted(prompt_tokens, time.monotonic() - ticket.arrived)
        return ticket

    def _open_window(self) -> None:
        window_id = WindowId(uuid.uuid4().hex[:12])
        window = BurstWindow(window_id, self._stage, self._on_open, self._on_round, self._on_over)
        self._windows.append(window)
        first = [self._next_ticket() for _ in range(min(len(self._waiting), self._max_rows))]
        window.open(first, self._window_max_age_s)

    def _on_open(self, opened: Opened) -> None:
        """A strict replica may play fewer rows than the settings say."""
        if opened.max_rows is not None:
            self._max_rows = min(self._max_rows, opened.max_rows)

    def _on_round(self, played: Played) -> None:
        self._pause_s = 0.0
        self._statistics.observe_round(played.report)
        if played.exchange is not None:
            self.traffic.add(played.exchange)
            self._statistics.observe_exchange(played.exchange)
        if any(row.finish for row in played.report.rows):
            self._schedule()

    def _on_over(self, window: BurstWindow, ending: Closed | Refused | None) -> None:
        """A window ended: what still lives in it goes to the head of the queue, in order."""
        self._windows.remove(window)
        survivors = [ticket for ticket in window.tickets.values() if not ticket.is_over]
        if not isinstance(ending, Refused):
            for ticket in survivors:
                ticket.move()
        self._waiting.extendleft(ticket for ticket in reversed(survivors) if not ticket.is_over)
        if survivors:
            self._pause()
        self._schedule()

    def _pause(self) -> None:
        """Wait a little before the next opening call, longer each time until a round is played."""
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        if not self._is_pausing:
            self._is_pausing = True
            asyncio.get_running_loop().call_later(self._pause_s, self._resume)

    def _resume(self) -> None:
        self._is_pausing = False
        self._schedule()
