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

from deployments.exchange.messages import DraftCall, Piece
from deployments.messages import Traffic
from deployments.settings import Transport as Mode


@dataclass
class Transport:
    """Chooses, and counts what was chosen."""

    mode: Mode = "auto"
    threshold: int = 256 * 1024  # bytes; auto: arrays from here on go as refs
    _traffic: Traffic = field(default_factory=Traffic)

    def dress(self, piece: Piece) -> Piece:
        """The piece as it shall travel; an array that becomes a ref is put in the object store once."""
        if not isinstance(piece.data, np.ndarray) or not self._as_ref(piece.data.nbytes):
            return piece
        return Piece(piece.start, piece.count, ray.put(piece.data), piece.skip)

    def is_by_reference(self, call: DraftCall) -> bool:
        """Whether the handle call that carries this message goes by reference. Also counts it."""
        pieces = [piece for row in call.features for piece in row.pieces]
        by_reference = self.mode == "ref" or any(not isinstance(p.data, np.ndarray) for p in pieces)
        name = "ref" if by_reference else "value"
        self._traffic.calls[name] = self._traffic.calls.get(name, 0) + 1
        return by_reference

    def count_bytes(self, piece: Piece, nbytes: int) -> None:
        """Count a piece that is sent."""
        name = "value" if isinstance(piece.data, np.ndarray) else "ref"
        self._traffic.bytes[name] = self._traffic.bytes.get(name, 0) + nbytes

    def count_failure(self) -> None:
        """Count a draft that did not come."""
        self._traffic.failures += 1

    def take_traffic(self) -> Traffic:
        """Counts since the last time."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _as_ref(self, nbytes: int) -> bool:
        if self.mode == "auto":
            return nbytes >= self.threshold
        return self.mode == "ref"


def to_wire(array: mx.array) -> np.ndarray:
    """Copy an MLX array out for the wire; numpy has no bfloat16, so its bits go as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def from_wire(array: np.ndarray, dtype: str) -> mx.array:
    """Read back what ``to_wire`` made of an array of this MLX dtype."""
    return mx.array(array).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(array)


def dtype_name(dtype: mx.Dtype) -> str:
    """``bfloat16`` of ``mlx.core.bfloat16``, and so on."""
    return str(dtype).removeprefix("mlx.core.")
