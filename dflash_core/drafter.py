"""The drafter in process: per-row contexts for any number of windows, drafted in one forward.

Rows are known by id. A row's context first grows in a staging area while its prompt is prefilled;
the first draft call that names it moves it beside the live rows, in the call's slot order. State can
always be made again from features: a call whose ``starts`` do not fit answers ``WindowLost``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_core.errors import WindowLost
from dflash_core.models.drafter import DrafterNetwork
from dflash_core.models.target import CacheArrays
from dflash_core.prefixes import SavedContext
from dflash_core.protocols import Drafts, FeatureBlock, Ready
from dflash_core.request import RowId, WindowId
from dflash_core.row_cache import FRESH, CacheShape, RowCaches, bucket_capacity, bucket_rows
from dflash_core.saved_row import SavedRow, copy_in, copy_out

# A classic round's features wait; this many are worth a forward of their own.
WAITING_LIMIT = 64


DraftFunction = Callable[..., tuple[mx.array, list[mx.array], list[mx.array]]]


class ContextRows:
    """Drafter-side caches whose slots belong to row ids."""

    def __init__(self, shape: CacheShape, num_slots: int, capacity: int):
        self.caches = RowCaches(shape, num_slots, capacity)
        self.row_ids: list[RowId | None] = [None] * num_slots

    def slot_of(self, row_id: RowId) -> int | None:
        """Where a row lives, if it does."""
        return self.row_ids.index(row_id) if row_id in self.row_ids else None

    def arrange(self, row_ids: tuple[RowId | None, ...], width: int) -> list[int]:
        """Take the slot order of ``row_ids``; returns the slots whose rows were not here."""
        places = [None if r is None else self.slot_of(r) for r in row_ids]
        stays = len(row_ids) == len(self.row_ids) and all(p in (None, i) for i, p in enumerate(places))
        if not stays:
            self.caches.arrange([FRESH if p is None else p for p in places], width)
        self.row_ids = list(row_ids)
        for slot, place in enumerate(places):
            if place is None:
                self.caches.lengths[slot] = 0
        return [
            i for i, (r, p) in enumerate(zip(row_ids, places, strict=True)) if r is not None and p is None
        ]

    def remove(self, row_id: RowId, *, scrub: bool) -> None:
        """Free a row's slot; ``scrub`` zeroes what it leaves, which may not be finite."""
        slot = self.slot_of(row_id)
        if slot is None:
            return
        self.row_ids[slot] = None
        self.caches.lengths[slot] = 0
        if scrub:
            self.caches.clear(slot)


@dataclass(slots=True)
class Session:
    """One window's contexts."""

    live: ContextRows
    staged: ContextRows


class LocalDrafter:
    """Implements ``Drafter`` on the device at hand."""

    def __init__(self, network: DrafterNetwork, *, cache_shape: CacheShape, block_size: int):
        self._network = network
        self._shape = cache_shape
        self._block_size = block_size
        self._sessions: dict[WindowId, Session] = {}
        self._extend = mx.compile(network.extend)
        self._drafts: dict[int, DraftFunction] = {}

    @property
    def block_size(self) -> int:
        """Widest block, the anchor included."""
        return self._block_size

    @property
    def feature_dtype(self) -> mx.Dtype:
        """Dtype of the features that it takes."""
        return self._shape.dtype

    @property
    def num_sessions(self) -> int:
        """Windows with state here."""
        return len(self._sessions)

    def context_lengths(self, window_id: WindowId) -> dict[RowId, int]:
        """Context length of every row of a window, staged rows included."""
        session = self._session(window_id)
        return {
            row_id: int(rows.caches.lengths[slot])
            for rows in (session.live, session.staged)
            for slot, row_id in enumerate(rows.row_ids)
            if row_id is not None
        }

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        """Append features without drafting; a start of 0 begins a row's context anew.

        Raises WindowLost if a row's context does not end where the features start.
        """
        session = self._session(window_id)
        known = [r for r in block.row_ids if r is not None and session.live.slot_of(r) is not None]
        if known:  # a context made again: the rows are live already
            self._append(session.live, block)
            return
        self._stage(session, block.row_ids, block.x.shape[1])
        self._append(session.staged, block)

    def save(self, window_id: WindowId, row_id: RowId, length: int) -> SavedContext | None:
        """A copy of the row's context, staged or live; None if it has not just that length."""
        session = self._session(window_id)
        for rows in (session.live, session.staged):
            slot = rows.slot_of(row_id)
            if slot is not None and rows.caches.lengths[slot] == length:
                saved = copy_out(rows.caches, slot)
                return SavedContext(length, saved.num_bytes, saved)
        return None

    def restore(self, window_id: WindowId, row_id: RowId, saved: SavedContext) -> None:
        """Stage a row with a context that ``save`` gave."""
        assert isinstance(saved.content, SavedRow)
        session = self._session(window_id)
        self._stage(session, (row_id,), saved.length)
        slot = session.staged.slot_of(row_id)
        assert slot is not None
        copy_in(session.staged.caches, slot, saved.content)

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        """Take the waiting features, then draft ``width - 1`` tokens after each anchor [B].

        Width 1 drafts nothing and leaves features waiting until they are worth a forward.
        Raises WindowLost as ``extend`` does.
        """
        if width == 1:
            has_taken = block.x.shape[1] >= WAITING_LIMIT
            if has_taken:
                self._join(window_id, block)
                self._append(self._session(window_id).live, block)
            return Ready(Drafts(mx.zeros((len(block.row_ids), 0), dtype=mx.int32), has_taken))
        live = self._join(window_id, block)
        self._check(live, block)
        T = block.x.shape[1]
        live.caches.reserve(T + width)
        lengths, counts = mx.array(live.caches.lengths), mx.array(block.counts)
        arrays = live.caches.take()
        run = self._drafts.setdefault(width, mx.compile(self._make_draft(width)))
        ids, keys, values = run(block.x, counts, lengths, anchors, arrays.keys, arrays.values)
        states, conv = arrays.states, arrays.conv
        del arrays
        live.caches.put(CacheArrays(keys, values, states, conv))
        live.caches.lengths += block.counts
        return Ready(Drafts(ids, has_taken=True))

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        """Forget rows that left the window."""
        session = self._sessions.get(window_id)
        if session is None:
            return
        for row_id in row_ids:
            session.live.remove(row_id, scrub=True)
            session.staged.remove(row_id, scrub=True)

    def close(self, window_id: WindowId) -> None:
        """Forget the whole window."""
        self._sessions.pop(window_id, None)

    def _session(self, window_id: WindowId) -> Session:
        if window_id not in self._sessions:
            capacity = bucket_capacity(self._block_size)
            self._sessions[window_id] = Session(
                live=ContextRows(self._shape, 1, capacity), staged=ContextRows(self._shape, 1, capacity)
            )
        return self._sessions[window_id]

    def _stage(self, session: Session, row_ids: tuple[RowId | None, ...], width: int) -> None:
        """Bring rows to the front of the staging area, in this order; those that are new begin empty."""
        keep = [r for r in session.staged.row_ids if r is not None and r not in row_ids]
        wanted = [*row_ids, *keep]
        padding = [None] * (bucket_rows(len(wanted)) - len(wanted))
        session.staged.arrange((*wanted, *padding), width)

    def _join(self, window_id: WindowId, block: FeatureBlock) -> ContextRows:
        """Bring the live rows into the call's order, staged rows beside them."""
        session = self._session(window_id)
        new_slots = session.live.arrange(block.row_ids, self._block_size)
        for slot in new_slots:
            row_id = block.row_ids[slot]
            assert row_id is not None
            source = session.staged.slot_of(row_id)
            if source is not None:
                needed = int(session.staged.caches.lengths[source])
                session.live.caches.reserve_length(needed + self._block_size)
                session.live.caches.copy_row(slot, session.staged.caches, source)
                session.staged.remove(row_id, scrub=False)
        return session.live

    def _check(self, rows: ContextRows, block: FeatureBlock) -> None:
        for slot, row_id in enumerate(block.row_ids):
            if row_id is not None and rows.caches.lengths[slot] != block.starts[slot]:
                raise WindowLost(
                    f"row {row_id}: context has {rows.caches.lengths[slot]} tokens, "
                    f"features start at {block.starts[slot]}"
                )

    def _append(self, rows: ContextRows, block: FeatureBlock) -> None:
        """Write features at the end of their rows' contexts; other slots of ``rows`` are left alone."""
        slots = [None if r is None else rows.slot_of(r) for r in block.row_ids]
        B, T = len(rows.row_ids), block.x.shape[1]
        source = np.zeros(B, dtype=np.int32)
        counts = np.zeros(B, dtype=np.int32)
        for i, slot in enumerate(slots):
            if slot is None:
                continue
            if block.starts[i] == 0:
                rows.caches.lengths[slot] = 0
            elif rows.caches.lengths[slot] != block.starts[i]:
                raise WindowLost(
                    f"row {block.row_ids[i]}: context has {rows.caches.lengths[slot]} tokens, "
                    f"features start at {block.starts[i]}"
                )
            source[slot], counts[slot] = i, block.counts[i]
        rows.caches.reserve(T)
        x = block.x if list(source) == list(range(B)) and len(slots) == B else block.x[mx.array(source)]
        # Slots beside the block get zeros, not another row's features: those may not be finite.
        x = mx.where((mx.array(counts) > 0)[:, None, None], x, mx.zeros((), dtype=x.dtype))
        arrays = rows.caches.take()
        keys, values = self._extend(x, mx.array(rows.caches.lengths), arrays.keys, arrays.values)
        states, conv = arrays.states, arrays.conv
        del arrays
        mx.async_eval(keys, values)
        rows.caches.put(CacheArrays(keys, values, states, conv))
        rows.caches.lengths += counts

    def _make_draft(self, width: int) -> DraftFunction:
        network = self._network

        def run(
            x: mx.array,
            counts: mx.array,
            lengths: mx.array,
            anchors: mx.array,
            keys: list[mx.array],
            values: list[mx.array],
        ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
            keys, values = network.extend(x, lengths, keys, values)
            return network.draft(anchors, lengths + counts, width, keys, values)

        return run
