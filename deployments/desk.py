"""The router's desk: a bounded queue of requests, and the windows that they are played in.

Runs on one event loop without locks: whatever changes who waits or who plays ends in ``_schedule``.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable

from deployments.affinity import Affinity, blocks_of
from deployments.burst import BurstWindow, Stage
from deployments.fair_queue import FairQueue
from deployments.generation import Ended, Event, Generation
from deployments.lanes import Board, LaneView, Standing
from deployments.messages import Closed, Opened, Played, Refused, Returned, Traffic
from deployments.placing import Places
from deployments.stranded import Stranded
from deployments.telemetry import Statistics
from deployments.ticket import Ticket
from deployments.view import WindowView
from dflash_core.errors import DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from dflash_core.request import WindowId
from dflash_core.text.stream import TextStream

logger = logging.getLogger("dflash.router")

FIRST_PAUSE_S = 0.05  # after a refusal or a lost window, before the next opening call
LONGEST_PAUSE_S = 1.0
SCOUT_S = 1.0  # until lanes that are known are not kept waiting for a window that nobody has taken


class Desk:
    """Takes generations in and gives events out.

    ``max_windows`` is for each lane.
    """

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
        self._board = Board(max_rows, is_anywhere_open=stage.is_anywhere_open)
        self._stranded = Stranded(self._board)
        self._affinity = Affinity()
        self._max_rows = max_rows
        self._max_windows = max_windows
        self._max_queue = max_queue
        self._window_max_age_s = window_max_age_s
        self._waiting = FairQueue(max_queue)
        self._windows: list[BurstWindow] = []
        self._scout: BurstWindow | None = None  # an empty window under way to whatever lane Serve finds
        self._is_closed = False
        self._is_draining = False
        self._mean_seconds = 2.0  # of recent requests, from admission to end

    @property
    def num_waiting(self) -> int:
        """Requests that have no place: a window that no replica has taken yet is none."""
        return len(self._waiting) + sum([len(w.tickets) for w in self._windows if not w.was_opened])

    @property
    def num_running(self) -> int:
        """Requests that have a place in a window."""
        return sum([len(w.tickets) for w in self._windows if w.was_opened])

    @property
    def num_windows(self) -> int:
        """Windows open, those that run out included."""
        return len(self._windows)

    def view(self) -> tuple[WindowView, ...]:
        """The open windows."""
        return tuple(window.view() for window in self._windows)

    @property
    def num_lanes(self) -> int:
        """Lanes that may be asked for a window."""
        return len(self._board)

    @property
    def has_own_lanes(self) -> bool:
        """Whether any of them is a target of this cluster."""
        return any(view.is_own for view in self._board)

    @property
    def room(self) -> int:
        """Further requests that would find a place at once."""
        return max(0, self._places().num_free - len(self._waiting))

    @property
    def own_room(self) -> int:
        """Those of them that would find it on this cluster's targets."""
        return max(0, self._places().num_free_own - len(self._waiting))

    def hear(self, source: str, standings: Iterable[Standing], state: str = "") -> None:
        """Take a source's word on its lanes: those that it does not name are gone. ``state``: its own."""
        self._board.hear(source, standings)
        self._stranded.note(source, state)
        self._take_back()
        self._schedule()
        self._turn_away()

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
        most = self._max_queue + self._num_rows_at_most()
        if generation.num_choices > most:
            raise InvalidRequest(f"this server has room for at most {most} choices of a request", param="n")
        tickets = {index: self._new_ticket(generation, index) for index in range(generation.num_choices)}
        events = tickets[0].events
        for ticket in tickets.values():
            ticket.events = events
        self._make_room(generation.client, len(tickets))
        self._waiting.extend(tickets.values())
        self._schedule()
        self._turn_away()
        return tickets, events

    def _make_room(self, client: str, count: int) -> None:
        """Raise QueueFull unless a client may add so many; what others hold beyond their share makes room."""
        waiting = self._num_queued()
        full = f"{waiting} answers are waiting already; try again later"
        # While it is not known whether there are lanes, nobody is known to wait.
        if not self._board.is_silent and not self._waiting.may_take(client, count):
            raise self._refusal(f"{full}: yours are up to half of them, and others wait too")
        excess = waiting + count - self._max_queue
        if excess <= 0 or (excess := excess - self._places().num_free) <= 0:
            return
        surplus = self._waiting.surplus(client)
        if len(surplus) < min(excess, count):
            raise self._refusal(full)
        self._refuse(surplus)

    def _refuse(self, surplus: Iterable[Ticket]) -> None:
        for ticket in surplus:
            self._waiting.remove(ticket)
            ticket.fail(self._refusal("more than half of those who wait were yours, and others came"))

    def _refusal(self, message: str) -> QueueFull:
        return QueueFull(message, retry_after=self._expected_wait_s())

    def _new_ticket(self, generation: Generation, index: int) -> Ticket:
        text, now = self._new_text(generation), time.monotonic()
        return Ticket(generation, text, self._eos_token_ids, now, self._statistics, index)

    def _num_queued(self) -> int:
        """Requests that the queue's bound holds for: rows that lost their place until a replica has them."""
        called = [window for window in self._windows if not window.was_opened]
        return len(self._waiting) + sum(t.has_started for w in called for t in w.tickets.values())

    def _num_rows_at_most(self) -> int:
        return max(self._max_rows, sum(view.max_rows for view in self._board)) * self._max_windows

    def _expected_wait_s(self) -> float:
        """When about half of the queue should have found a place."""
        rows = self._num_rows_at_most()
        return max(1.0, round(self._mean_seconds * (len(self._waiting) + rows) / (2 * rows), 1))

    def _leave(self, ticket: Ticket, reason: str) -> None:
        ticket.is_over = True
        now = time.monotonic()
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
        """Give places to those whose turn it is; windows are opened with all the rows that are for them."""
        if self._waiting and self._scout is None and not self._is_closed:  # it may be on any of the lanes
            if len(self._board):
                self._seat()
            elif self._stage.is_anywhere_open:
                self._send_scout()
        for window in self._windows:
            window.open(self._window_max_age_s)
        if not self._board.is_silent:
            self._refuse(self._waiting.surplus())
        self._statistics.observe_waiting(self.num_waiting)
        self._statistics.observe_running(self.num_running)

    def _seat(self) -> None:
        unwanted: set[str] = set()  # lanes that take nobody who waits
        while self._waiting:
            places = self._places()
            place = places.best(but=unwanted)
            if place is None:
                break
            ticket = self._next_ticket(places, place[0])
            if ticket is None:
                unwanted.add(place[0].name)
                continue
            blocks = blocks_of(ticket.generation.prompt_ids)
            lane, window = places.nearer(place, ticket, self._affinity.shared(blocks))
            (window or self._new_window(lane)).join(ticket)
            lane.num_placed += 1
            self._affinity.note(lane.name, blocks)

    def _send_scout(self) -> None:
        """Where no lane is known a call may last until a replica is there: rows keep their turn meanwhile."""
        if not self._board.anywhere.is_pausing:
            self._scout = self._new_window(self._board.anywhere)

    def _take_back(self) -> None:
        """Calls that nobody has taken, to lanes that are gone: their rows have no place to wait for there."""
        rows: list[Ticket] = []
        for window in [w for w in self._windows if not w.was_opened and w.lane not in self._board]:
            if window is self._scout:
                if not len(self._board) or window.called_s < SCOUT_S:
                    continue
                self._scout = None
            self._windows.remove(window)
            rows += window.take_back()
        self._waiting.put_back(rows)

    def _places(self) -> Places:
        return Places(self._board, self._windows, self._max_windows)

    def _turn_away(self) -> None:
        if not self._waiting or self._stage.is_anywhere_open:
            return
        for ticket, reason in self._stranded.overdue(self._waiting):
            self._waiting.remove(ticket)
            ticket.fail(reason)

    def _next_ticket(self, places: Places, lane: LaneView) -> Ticket | None:
        ticket = self._waiting.pop(lambda ticket: places.takes(lane, ticket))
        if ticket is not None and not ticket.was_admitted:
            ticket.was_admitted = True
            prompt_tokens = len(ticket.generation.prompt_ids)
            ticket.waited_s = time.monotonic() - ticket.arrived
            self._statistics.observe_admitted(prompt_tokens, ticket.waited_s)
        return ticket

    def _new_window(self, lane: LaneView) -> BurstWindow:
        window = BurstWindow(
            WindowId(uuid.uuid4().hex[:12]),
            self._stage,
            self._on_open,
            self._on_round,
            self._on_over,
            self._on_return,
            lane.name,
            lambda window: self._board.takes_windows(window.lane),
        )
        self._windows.append(window)
        return window

    def _on_open(self, window: BurstWindow, opened: Opened) -> None:
        if window is self._scout:
            self._scout = None
        if opened.is_own:  # of lanes elsewhere the board hears from who watches them
            self._board.add(opened.lane, opened.max_rows)
        self._schedule()

    def _on_round(self, window: BurstWindow, played: Played) -> None:
        if played.report.live_rows > 0:
            self._board[window.lane].observe_round(sum(played.report.seconds.values()))
        self._statistics.observe_round(played.report)
        if played.exchange is not None:
            self.traffic.add(played.exchange)
            self._statistics.observe_exchange(played.exchange)
        num_finished = sum(row.finish is not None for row in played.report.rows)
        self._board[window.lane].num_placed -= num_finished  # their places are free, whatever it told
        if num_finished or self._waiting.has_moved:  # a token may have cleared a row that kept them waiting
            self._schedule()

    def _on_over(self, window: BurstWindow, ending: Closed | Refused | None) -> None:
        """A window ended: what still lives in it goes to the head of the queue, in order.

        There it waits for a replica as long as its deadline lets it.
        """
        self._windows.remove(window)
        if window is self._scout:
            self._scout = None
        survivors = [ticket for ticket in window.tickets.values() if not ticket.is_over]
        if window.was_opened:  # else no replica was there to take it, and no row is to blame
            for ticket in survivors:
                ticket.move()
        self._waiting.put_back(ticket for ticket in survivors if not ticket.is_over)
        if survivors or not window.was_opened:
            self._pause(self._board[window.lane])
        self._schedule()

    def _on_return(self, window: BurstWindow, ticket: Ticket, returned: Returned) -> None:
        """A remote lane gave a row back: it is the next to find a place."""
        if returned.was_playing:
            ticket.move()
        if not ticket.is_over:
            self._waiting.put_back([ticket])
        self._pause(self._board[window.lane], returned.retry_after_s)
        self._schedule()

    def _pause(self, lane: LaneView, least_s: float = 0.0) -> None:
        """Leave a lane alone for a little while, longer each time until it plays a round."""
        if not lane.is_pausing:
            lane.is_pausing = True
            lane.pause_s = min(max(2 * lane.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            asyncio.get_running_loop().call_later(max(lane.pause_s, least_s), self._resume, lane)

    def _resume(self, lane: LaneView) -> None:
        lane.is_pausing = False
        self._schedule()
