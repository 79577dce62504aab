"""Prefix reuse: a row whose prompt begins as an earlier one's did starts from that one's saved state.

A state can be taken only where a row stands: recurrent state cannot be cut back. So prompts are read in
chunks that end at the positions which the request names (message boundaries), and a turn's end is saved
only where it stands on emitted tokens alone. Nothing is kept before its row has been found finite.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from dflash_core.events import PrefixCounts
from dflash_core.prefix_store import Origin, PrefixStore
from dflash_core.protocols import Drafter, FeatureBlock
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.row import Row
from dflash_core.row_cache import RowCaches
from dflash_core.saved_row import SavedRow, copy_in, copy_out

LEAST_GAIN = 16  # tokens; where a row began from a state so little earlier, another is not worth its bytes


@dataclass(frozen=True, slots=True)
class SavedContext:
    """A drafter's side of a row. What ``content`` is, is its drafter's own business."""

    length: int
    num_bytes: int
    content: object


class ContextKeeper(Drafter, Protocol):
    """A drafter that can hand out a row's context and take it back under another name."""

    def save(self, window_id: WindowId, row_id: RowId, length: int) -> SavedContext | None:
        """The row's context, which has ``length`` tokens; None if it is not held in one piece."""
        ...

    def restore(self, window_id: WindowId, row_id: RowId, saved: SavedContext) -> None:
        """Begin a row with a context that ``save`` gave."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row's state after its first ``row.length`` tokens: context + waiting = target length."""

    row: SavedRow
    context: SavedContext
    waiting: mx.array | None  # [1, T, D] features that the drafter has not taken; None: it has all

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return (
            self.row.num_bytes + self.context.num_bytes + (0 if self.waiting is None else self.waiting.nbytes)
        )


class Prefixes:
    """Saves and finds for the windows of one target."""

    def __init__(self, store: PrefixStore[Snapshot], origin: Origin, drafter: ContextKeeper):
        self._store, self._origin, self._drafter = store, origin, drafter
        self._num_queried = self._num_found = 0

    def begin(self, window_id: WindowId, row: Row, caches: RowCaches, slot: int) -> int:
        """Start a row from the longest saved prefix of its tokens; how many of them it need not read."""
        request = row.request
        if request.wants_prompt_logprobs:  # they come from reading
            return 0
        self._num_queried += len(request.tokens)
        found = self._store.find(self._origin, request.tokens)
        if found is None:
            return 0
        copy_in(caches, slot, found.row)
        self._drafter.restore(window_id, row.row_id, found.context)
        if found.waiting is not None:
            starts = np.array([found.context.length], dtype=np.int32)
            counts = np.array([found.row.length], dtype=np.int32) - starts
            self._drafter.extend(window_id, FeatureBlock((row.row_id,), starts, counts, found.waiting))
        self._num_found += found.row.length
        return found.row.length

    def next_stop(self, request: RowRequest, began: int, length: int) -> int:
        """Where the chunk that begins at ``length`` must end at the latest.

        ``began`` is where the row was when its reading began. What is saved already is no reason to go on
        past a place: a row's chunks, and so its last bits, depend on its request and on ``began`` alone.
        """
        least = max(length + 1, began + LEAST_GAIN if began else 0)
        places = (at for at in request.save_at if least <= at < len(request.tokens))
        return min(places, default=len(request.tokens))

    def is_wanted(self, request: RowRequest, began: int, length: int) -> bool:
        """Whether the state after the first ``length`` tokens is to be saved, and is not yet."""
        if length not in request.save_at or (began and length < began + LEAST_GAIN):
            return False
        return not self._store.has(self._origin, request.tokens[:length])

    def take(
        self,
        window_id: WindowId,
        row_id: RowId,
        caches: RowCaches,
        slot: int,
        waiting: tuple[mx.array, int] | None = None,
    ) -> Snapshot | None:
        """Copy out a row's state where it stands; None if the drafter's side of it is not whole.

        ``waiting`` are features [1, T, D] that the drafter has not taken, and how many of them are real.
        """
        features, count = waiting if waiting is not None and waiting[1] else (None, 0)
        context = self._drafter.save(window_id, row_id, int(caches.lengths[slot]) - count)
        if context is None:
            return None
        if features is not None:
            mx.async_eval(features)
        return Snapshot(copy_out(caches, slot), context, features)

    def keep(self, tokens: tuple[int, ...], snapshot: Snapshot) -> None:
        """Keep a snapshot of a row that was found finite, under all the tokens that the row had emitted."""
        prefix = tokens[: snapshot.row.length]
        self._store.save(self._origin, prefix, snapshot, snapshot.num_bytes)

    def take_counts(self) -> PrefixCounts:
        """What was looked up since the last time, and what is held."""
        counts = PrefixCounts(self._num_queried, self._num_found, self._store.num_bytes)
        self._num_queried = self._num_found = 0
        return counts
