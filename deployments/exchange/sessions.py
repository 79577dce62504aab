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

LONG_TOKENS = 32  # more than this is appended for its row alone, so that others are not padded to it
CHUNK_TOKENS = 512  # of a long piece


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
        self._like = np.zeros((0, 1), np.float32)  # [0, D] as on the wire, once any have come

    @property
    def num_sessions(self) -> int:
        """Windows with state here."""
        return len(self._sessions)

    def draft(self, call: DraftCall) -> DraftReply:
        """Take what is new of each row, then draft. Refs in the call have been fetched already."""
        if call.fingerprint != self._fingerprint:
            return DraftReply(call.number, self._fingerprint, _no_ids(call))
        try:
            return self._draft(call)
        except Exception:
            self.close(call.window_id)  # half-taken state is of no use; the target sends all of it again
            raise

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

    def _draft(self, call: DraftCall) -> DraftReply:
        session = self._sessions.setdefault(call.window_id, _Session())
        session.used_at = self._clock()
        self._drop(call.window_id, session, tuple(r for r in session.lengths if r not in call.row_ids))
        lost = self._check(call, session)
        fitting = [row for row in call.features if row.row_id not in lost]
        news = {row.row_id: _join(row) for row in fitting if row.count}
        for row in fitting:
            if row.count > LONG_TOKENS or (lost and row.count):
                self._extend(call, row, news.pop(row.row_id))
            session.lengths[row.row_id] = row.start + row.count
        ids = _no_ids(call)
        if not lost:
            block = self._block(call.dtype, call.row_ids, news, session.lengths)
            drafts = self._drafter.draft(call.window_id, block, mx.array(call.anchors), call.width)
            ids = np.array(drafts.wait().ids)
        lengths = {row.row_id: session.lengths.get(row.row_id, 0) for row in call.features}
        return DraftReply(call.number, self._fingerprint, ids, lengths, lost)

    def _check(self, call: DraftCall, session: _Session) -> tuple[RowId, ...]:
        """Rows that are not where the target believes; those that begin anew are cleared first."""
        restarted = tuple(r.row_id for r in call.features if r.start == 0 and r.row_id in session.lengths)
        self._drop(call.window_id, session, restarted)
        return tuple(r.row_id for r in call.features if session.lengths.get(r.row_id, 0) != r.start)

    def _drop(self, window_id: WindowId, session: _Session, row_ids: tuple[RowId, ...]) -> None:
        known = tuple(row_id for row_id in row_ids if session.lengths.pop(row_id, None) is not None)
        if known:
            self._drafter.drop(window_id, known)

    def _extend(self, call: DraftCall, row: RowFeatures, x: np.ndarray) -> None:
        """Append one row's features [T, D] in chunks."""
        for begin in range(0, len(x), CHUNK_TOKENS):
            chunk = x[begin : begin + CHUNK_TOKENS]
            end = {row.row_id: row.start + begin + len(chunk)}
            block = self._block(call.dtype, (row.row_id,), {row.row_id: chunk}, end)
            self._drafter.extend(call.window_id, block)

    def _block(
        self,
        dtype: str,
        row_ids: tuple[RowId | None, ...],
        news: dict[RowId, np.ndarray],
        lengths: dict[RowId, int],
    ) -> FeatureBlock:
        """One block [B, T, D] of rows [T_b, D] that end at ``lengths``; T is bucketed, at least 1."""
        parts = [news.get(row_id) if row_id is not None else None for row_id in row_ids]
        counts = np.array([0 if x is None else len(x) for x in parts], np.int32)
        ends = np.array([lengths.get(row_id, 0) if row_id is not None else 0 for row_id in row_ids], np.int32)
        self._like = next((x for x in parts if x is not None), self._like)[:0]
        width = 1 << max(int(counts.max()) - 1, 0).bit_length()
        padded = np.zeros((len(row_ids), width, self._like.shape[1]), self._like.dtype)
        for slot, x in enumerate(parts):
            if x is not None:
                padded[slot, : len(x)] = x
        return FeatureBlock(row_ids, ends - counts, counts, from_wire(padded, dtype))


def _no_ids(call: DraftCall) -> np.ndarray:
    return np.zeros((len(call.row_ids), 0), np.int32)


def _join(row: RowFeatures) -> np.ndarray:
    """A row's pieces as one array [T, D]."""
    arrays = [np.asarray(piece.data)[piece.skip : piece.skip + piece.count] for piece in row.pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
