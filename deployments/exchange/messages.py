"""What target and drafter say to each other. Arrays are numpy here; bfloat16 travels as uint16 bits."""

from dataclasses import dataclass, field

import numpy as np
import ray

from dflash_core.request import RowId, WindowId


@dataclass(frozen=True, slots=True)
class Piece:
    """Projected features of one row at positions ``start .. start + count - 1``.

    They are ``data[skip : skip + count]``; ``data`` is an array [N, D], or a ref to one in the target's
    object store. Several pieces may share one.
    """

    start: int
    count: int
    data: "np.ndarray | ray.ObjectRef"
    skip: int = 0


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """What a row's context lacks. The drafter must hold ``start`` tokens of it; 0 means: begin anew."""

    row_id: RowId
    start: int
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """Tokens in all pieces."""
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One round's question. Slots follow ``row_ids``; None is an idle slot. Rows not named have ended."""

    window_id: WindowId
    number: int  # rises with every call of a window; an answer to an older one is dropped
    fingerprint: str  # of the drafter whose ``fc`` made the features
    dtype: str  # of the features
    token_bytes: int  # of one token's features
    row_ids: tuple[RowId | None, ...]  # [B]
    features: tuple[RowFeatures, ...]  # rows that are not idle, those without news too
    anchors: np.ndarray  # [B] int32
    width: int


@dataclass(frozen=True, slots=True)
class DraftReply:
    """The answer. ``ids`` has width 0 when a row's context did not fit, or the drafter is another one."""

    number: int
    fingerprint: str
    ids: np.ndarray  # [B, K - 1] int32
    lengths: dict[RowId, int] = field(default_factory=dict)  # what the drafter holds of each row now
    lost: tuple[RowId, ...] = ()  # rows whose context length was not ``start``
