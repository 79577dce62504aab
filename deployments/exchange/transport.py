"""The one place that decides how feature arrays travel: by object ref, by value, or by size.

A ref stays in the target's object store and is fetched by the drafter straight from there. It may only
ride in a by-reference handle call: pickled into a by-value (gRPC) call, Ray would pin it for ever. By
value is faster for what a round brings (1.4 ms against 3 to 5 a round); refs are for prompts and for
whole contexts that are sent again.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import ray

from deployments.exchange.messages import DraftCall, Piece, RowFeatures
from deployments.messages import Traffic
from deployments.settings import Transport as Mode


@dataclass
class Transport:
    """Chooses, and counts what was chosen."""

    mode: Mode = "auto"
    threshold: int = 2**20  # bytes; auto: arrays, and messages of small arrays, from here on go as refs
    _traffic: Traffic = field(default_factory=Traffic)

    def store(self, piece: Piece) -> Piece:
        """A lasting piece as it shall travel; an array that becomes a ref is put in the store once."""
        if not isinstance(piece.data, np.ndarray) or not self._as_ref(piece.data.nbytes):
            return piece
        return Piece(piece.start, piece.count, ray.put(piece.data), piece.skip)

    def pack(self, rows: tuple[RowFeatures, ...]) -> tuple[RowFeatures, ...]:
        """What is left of a message's small arrays, in one object if they go as refs: a put each is slow."""
        loose = [p.data[p.skip :] for row in rows for p in row.pieces if isinstance(p.data, np.ndarray)]
        if not loose or not self._as_ref(sum(array.nbytes for array in loose)):
            return rows
        ref = ray.put(np.concatenate(loose))
        offset = 0
        packed: list[RowFeatures] = []
        for row in rows:
            pieces: list[Piece] = []
            for piece in row.pieces:
                if isinstance(piece.data, np.ndarray):
                    pieces.append(Piece(piece.start, piece.count, ref, offset))
                    offset += piece.count
                else:
                    pieces.append(piece)
            packed.append(RowFeatures(row.row_id, row.start, tuple(pieces)))
        return tuple(packed)

    def is_by_reference(self, call: DraftCall) -> bool:
        """Whether the handle call that carries this message goes by reference. Also counts it."""
        pieces = [piece for row in call.features for piece in row.pieces]
        by_reference = self.mode == "ref" or any(not isinstance(p.data, np.ndarray) for p in pieces)
        _count(self._traffic.calls, "ref" if by_reference else "value", 1)
        for piece in pieces:
            name = "value" if isinstance(piece.data, np.ndarray) else "ref"
            _count(self._traffic.bytes, name, piece.count * call.token_bytes)
        return by_reference

    def count_failure(self) -> None:
        """Count a draft that did not come."""
        self._traffic.failures += 1

    def count_mismatch(self) -> None:
        """Count a draft that met another drafter."""
        self._traffic.failures += 1
        self._traffic.mismatches += 1

    def count_lost_context(self) -> None:
        """Count a row that goes on without drafts."""
        self._traffic.contexts_lost += 1

    @property
    def num_failures(self) -> int:
        """Failures since the last time."""
        return self._traffic.failures

    def take_traffic(self) -> Traffic:
        """Counts since the last time."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _as_ref(self, nbytes: int) -> bool:
        if self.mode == "auto":
            return nbytes >= self.threshold
        return self.mode == "ref"


def _count(counts: dict[str, int], name: str, amount: int) -> None:
    counts[name] = counts.get(name, 0) + amount


def to_wire(array: mx.array) -> np.ndarray:
    """Copy an MLX array out for the wire; numpy has no bfloat16, so its bits go as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def from_wire(array: np.ndarray, dtype: str) -> mx.array:
    """Read back what ``to_wire`` made of an array of this MLX dtype."""
    return mx.array(array).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(array)


def dtype_name(dtype: mx.Dtype) -> str:
    """``bfloat16`` of ``mlx.core.bfloat16``, and so on."""
    return str(dtype).removeprefix("mlx.core.")
