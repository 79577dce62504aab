"""The drafter's side of the exchange: one session per window, on the replica's MLX thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from deployments.exchange.messages import DraftCall, DraftReply, RowFeatures
from deployments.exchange.transport import from_wire
from dflash_core.protocols import Drafter, FeatureBlock
from dflash_core.request import RowId, WindowId

LONG_PIECE_TOKENS = 32  # more than this is appended for its row alone, so that others are not padded to it


@dataclass
class _Session:
    lengths: dict[RowId, int] = field(default_factory=dict)
    used_at: float = 0.0


class Sessions:
    """Contexts of many windows in one drafter. Every method runs on the MLX thread."""

    def __init__(
        self,
        drafter: Drafter,
        fingerprint: str,
        ttl_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._drafter = drafter
        self._fingerprint = fingerprint
        self._ttl_s = ttl_s
        self._clock = clock
        self._sessions: dict[WindowId, _Session] = {}

    @property
    def num_sessions(self) -> int:
        """Windows with state here."""
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftReply:
        """Take what is new of each row, then draft. Refs in the call have been fetched already."""
        nothing = np.zeros((len(call.row_ids), 0), np.int32)
        if call.fingerprint != self._fingerprint:
            return DraftReply(call.number, self._fingerprint, nothing)
        session = self._sessions.setdefault(call.window_id, _Session())
        session.used_at = self._clock()
        ended = tuple(row_id for row_id in session.lengths if row_id not in call.row_ids)
        self._drop(call.window_id, session, ended)
        lost = self._check(call, session)
        fitting = [row for row in call.features if row.row_id not in lost]
        block = self._take(call, session, fitting)
        if lost:
            self._drafter.extend(call.window_id, block)
            ids = nothing
        else:
            anchors = mx.array(call.anchors)
            ids = np.array(self._drafter.draft(call.window_id, block, anchors, call.width).wait().ids)
        for row in fitting:
            session.lengths[row.row_id] = row.start + row.count
        lengths = {row.row_id: session.lengths.get(row.row_id, 0) for row in call.features}
        return DraftReply(call.number, self._fingerprint, ids, lengths, lost)

    def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        """How much of each row of a window is held here; empty if the window is not known."""
        session = self._sessions.get(window_id)
        return dict(session.lengths) if session is not None else {}

    def close(self, window_id: WindowId) -> None:
        """Forget a window."""
        if self._sessions.pop(window_id, None) is not None:
            self._drafter.close(window_id)

    def sweep(self) -> None:
        """Forget windows that nobody has used for the time to live; their target is gone or moved."""
        oldest = self._clock() - self._ttl_s
        for window_id in [w for w, session in self._sessions.items() if session.used_at < oldest]:
            self.close(window_id)

    def _check(self, call: DraftCall, session: _Session) -> tuple[RowId, ...]:
        """Rows that are not where the target believes; those that begin anew are cleared first."""
        restarted = tuple(r.row_id for r in call.features if r.start == 0 and r.row_id in session.lengths)
        self._drop(call.window_id, session, restarted)
        return tuple(r.row_id for r in call.features if session.lengths.get(r.row_id, 0) != r.start)

    def _drop(self, window_id: WindowId, session: _Session, row_ids: tuple[RowId, ...]) -> None:
        known = tuple(row_id for row_id in row_ids if session.lengths.pop(row_id, None) is not None)
        if known:
            self._drafter.drop(window_id, known)

    def _take(self, call: DraftCall, session: _Session, rows: list[RowFeatures]) -> FeatureBlock:
        """Append long pieces row by row; return the block of the short ones, in the call's slots."""
        short: dict[RowId, tuple[int, mx.array]] = {}
        for row in rows:
            if row.count > LONG_PIECE_TOKENS:
                block = _block((row.row_id,), {row.row_id: (row.start, _join(row, call.dtype))})
                self._drafter.extend(call.window_id, block)
            elif row.count:
                short[row.row_id] = (row.start, _join(row, call.dtype))
        held = {row.row_id: row.start + row.count for row in rows} | {
            row_id: start for row_id, (start, _) in short.items()
        }
        return _block(call.row_ids, short, held)


def _join(row: RowFeatures, dtype: str) -> mx.array:
    """A row's pieces as one array [T, D]."""
    arrays = [from_wire(np.asarray(piece.data)[piece.skip :], dtype) for piece in row.pieces]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _block(
    row_ids: tuple[RowId | None, ...],
    features: dict[RowId, tuple[int, mx.array]],
    held: dict[RowId, int] | None = None,
) -> FeatureBlock:
    """Pad rows [T_b, D] to one block [B, T, D]; rows without features get count 0 at their held length."""
    taken = [features.get(row_id) if row_id is not None else None for row_id in row_ids]
    counts = np.array([len(t[1]) if t is not None else 0 for t in taken], np.int32)
    starts = np.array(
        [
            t[0] if t is not None else (held or {}).get(row_id, 0) if row_id is not None else 0
            for row_id, t in zip(row_ids, taken, strict=True)
        ],
        np.int32,
    )
    some = next((t[1] for t in taken if t is not None), None)
    if some is None:  # nothing new for anyone
        return FeatureBlock(row_ids, starts, counts, mx.zeros((len(row_ids), 0, 0)))
    empty = mx.zeros((_bucket(int(counts.max())), some.shape[1]), some.dtype)
    padded = [empty if t is None else mx.concatenate([t[1], empty[len(t[1]) :]]) for t in taken]
    return FeatureBlock(row_ids, starts, counts, mx.stack(padded))


def _bucket(count: int) -> int:
    """The next power of two, so that there are few shapes."""
    return 1 << (count - 1).bit_length()
