"""Requests that no lane may take: where all lanes are elsewhere, they are told so before their time is over.

With targets of its own a router waits for them: Serve starts another. Nobody here starts a cluster elsewhere
again, and a client that hears 503 may ask another server.
"""

import time
from collections import Counter
from collections.abc import Iterable

from deployments.lanes import Board, LaneView
from deployments.ticket import Ticket
from dflash_core.errors import Unavailable

PATIENCE_S = 5.0


class Stranded:
    """Tells which requests of one router wait in vain."""

    def __init__(self, board: Board):
        self._board = board
        self._states: dict[str, str] = {}  # of those that tell of lanes
        self._empty_at: float | None = None  # since when there is no lane

    def note(self, source: str, state: str) -> None:
        """A source of lanes has told of them; ``state`` is how it is, in words for a client."""
        self._states[source] = state
        if any(True for _ in self._board):
            self._empty_at = None
        elif self._empty_at is None:
            self._empty_at = time.monotonic()

    def overdue(self, waiting: Iterable[Ticket]) -> list[tuple[Ticket, Unavailable]]:
        """Those that no lane has been there for long enough, with what to tell them.

        Whose answer has begun is none of them: it goes on once a lane is back, within its time.
        """
        found: list[tuple[Ticket, Unavailable]] = []
        now, lanes = time.monotonic(), tuple(self._board)
        begun = {ticket.generation.id for ticket in waiting if ticket.has_started}  # a choice of it
        for ticket in waiting:
            if any(lane.takes(ticket) for lane in lanes):
                ticket.stranded_at = None
                continue
            if ticket.stranded_at is None:
                ticket.stranded_at = now if self._empty_at is None else self._empty_at
            if now - ticket.stranded_at >= PATIENCE_S and ticket.generation.id not in begun:
                found.append((ticket, Unavailable(self._reason(lanes, ticket))))
        return found

    def _reason(self, lanes: Iterable[LaneView], ticket: Ticket) -> str:
        objections = sorted({objection for lane in lanes if (objection := lane.objection(ticket))})
        return f"no lane can take this request now: {'; '.join(objections) or self._explain()}"

    def _explain(self) -> str:
        """Without the addresses, which are no client's business."""
        states = Counter(state or "silent" for state in self._states.values())
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"of the remote lanes {told}" if told else "none is known yet"
