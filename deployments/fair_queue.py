"""Requests that wait for a place, fair between clients.

Places go round robin over the clients, and inside one to whoever came first. Rows that had a place and lost
it with their window stand before all others. A client may fill the queue as long as nobody else waits; as
soon as somebody does, no client holds more than half of it: what it held beyond is refused, from its end.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from deployments.ticket import Ticket


class FairQueue:
    """Tickets of many clients. ``max_waiting`` is the size that half a queue is reckoned from."""

    def __init__(self, max_waiting: int):
        self._share = max(1, max_waiting // 2)
        self._moved: deque[Ticket] = deque()
        # The first client is the next to get a place.
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        """Tickets that wait."""
        return len(self._moved) + sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._moved
        for tickets in self._clients.values():
            yield from tickets

    @property
    def has_moved(self) -> bool:
        """Whether a ticket that lost its place waits."""
        return bool(self._moved)

    def num_of(self, client: str) -> int:
        """Tickets of one client, those that lost their place included."""
        moved = sum(ticket.generation.client == client for ticket in self._moved)
        return moved + len(self._clients.get(client, ()))

    def may_take(self, client: str, count: int) -> bool:
        """Whether a client may add so many: any number while it waits alone, else up to half of the queue."""
        held = self.num_of(client)
        return held == len(self) or held + count <= self._share

    def extend(self, tickets: Iterable[Ticket]) -> None:
        """Tickets come to wait, each behind its client's others."""
        for ticket in tickets:
            self._clients.setdefault(ticket.generation.client, deque()).append(ticket)

    def put_back(self, tickets: Iterable[Ticket]) -> None:
        """Tickets lost their place: they get the next ones, in this order; first those that had begun."""
        self._moved = deque(sorted((*tickets, *self._moved), key=lambda ticket: not ticket.has_started))

    def pop(self, may: Callable[[Ticket], bool] = lambda ticket: True) -> Ticket | None:
        """The ticket that gets the next place: the first in turn that may have it, None if none may."""
        if (moved := next(filter(may, self._moved), None)) is not None:
            self._moved.remove(moved)
            return moved
        for client, tickets in self._clients.items():
            if (ticket := next(filter(may, tickets), None)) is not None:
                tickets.remove(ticket)
                if tickets:
                    self._clients.move_to_end(client)  # behind the other clients
                else:
                    del self._clients[client]
                return ticket
        return None

    def remove(self, ticket: Ticket) -> None:
        """A ticket waits no longer; nothing happens if it did not."""
        if ticket in self._moved:
            self._moved.remove(ticket)
            return
        tickets = self._clients.get(ticket.generation.client)
        if tickets is not None and ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del self._clients[ticket.generation.client]

    def surplus(self, newcomer: str | None = None) -> Sequence[Ticket]:
        """Tickets that clients hold beyond half while another waits, or ``newcomer`` is about to.

        They are a client's last requests. A request whose choices wait in part only, since the others have
        their place, stays.
        """
        if len(self) <= self._share or not self._have_company(newcomer):
            return ()
        return [t for client in self._clients if client != newcomer for t in self._beyond_share(client)]

    def _have_company(self, newcomer: str | None) -> bool:
        clients = {*self._clients, *(ticket.generation.client for ticket in self._moved)}
        return len(clients if newcomer is None else clients | {newcomer}) > 1

    def _beyond_share(self, client: str) -> Sequence[Ticket]:
        num_beyond, found = self.num_of(client) - self._share, list[Ticket]()
        requests = [list(choices) for _, choices in groupby(self._clients[client], lambda t: t.generation.id)]
        while len(found) < num_beyond and requests:
            last = requests.pop()
            if len(last) < last[0].generation.num_choices:
                break
            found += last
        return found
