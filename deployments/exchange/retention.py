"""The bound on features kept by one target replica, over all of its windows.

Beyond it the oldest row's go first. Of every row, what the drafter holds already goes before anything
else: it is only kept in case the drafter loses it, so nothing changes for a row as long as the drafter's
context is intact. If the drafter does lose a context that cannot be made again, its row goes on without
drafts to its end: it is given one token a round, the same tokens as ever. Reading the row's tokens through
the target again would bring its features back; that is not done.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from deployments.exchange.messages import Piece

SHARE_OF_OBJECT_STORE = 0.1


@dataclass(eq=False)
class RowLedger:
    """One row: consecutive pieces, and how far the drafter has them."""

    pieces: list[Piece] = field(default_factory=list)
    length: int = 0
    confirmed: int = 0
    loose: int = 0  # pieces at the end that are not merged yet
    token_bytes: int = 0
    is_lost: bool = False  # what the drafter lacks is not kept any more

    @property
    def kept_from(self) -> int:
        """The first position whose features are still here."""
        return self.pieces[0].start if self.pieces else self.length

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces, in this process or in the object store."""
        return sum(piece.count for piece in self.pieces) * self.token_bytes

    def let_go(self, end: int) -> int:
        """Drop the pieces that end by this position; returns their bytes."""
        before = self.num_bytes
        while self.pieces and self.pieces[0].start + self.pieces[0].count <= end:
            del self.pieces[0]
        self.loose = min(self.loose, len(self.pieces))
        return before - self.num_bytes


class Retention:
    """Knows all rows, oldest first, and what they keep."""

    def __init__(self, limit: int | None = None, on_lost: Callable[[], None] = lambda: None):
        """``limit`` in bytes, None for no bound; ``on_lost`` hears of every row that loses its drafts."""
        self._limit = limit
        self._on_lost = on_lost
        self._rows: dict[RowLedger, None] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return self._num_bytes

    def add(self, row: RowLedger, size: int) -> None:
        """A row keeps so many bytes more; make room for them."""
        self._rows.setdefault(row)
        self._num_bytes += size
        if self._limit is None:
            return
        for old in self._rows:
            if self._num_bytes <= self._limit:
                return
            self._num_bytes -= old.let_go(old.confirmed)
        # The drafter is far behind: only now at the cost of drafts, and of few rows. One that keeps nothing
        # is whole as long as its context is.
        for old in sorted(self._rows, key=lambda row: row.num_bytes, reverse=True):
            if self._num_bytes <= self._limit or not old.num_bytes:
                return
            self.give_up(old)

    def give_up(self, row: RowLedger) -> None:
        """The row goes on without drafts, and keeps nothing from now on."""
        if not row.is_lost:
            row.is_lost = True
            self._num_bytes -= row.let_go(row.length)
            self._on_lost()

    def remove(self, row: RowLedger) -> None:
        """The row ended."""
        if row in self._rows:
            del self._rows[row]
            self._num_bytes -= row.num_bytes


def default_limit() -> int:
    """A tenth of the object store of the node that this process runs on."""
    here = ray.get_runtime_context().get_node_id()
    stores = {node["NodeID"]: node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes()}
    return int(SHARE_OF_OBJECT_STORE * stores[here])
