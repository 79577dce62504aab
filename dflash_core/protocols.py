"""The two parts that the round loop is written against.

In-process objects implement them for the command line, tests and benchmarks; adapters in
``deployments`` implement ``Drafter`` over Ray. Everything here is called on the MLX thread.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from dflash_core.request import RowId, WindowId


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """Projected features (after ``fc`` and ``hidden_norm``) that a drafter has not taken yet.

    Row b's features are ``x[b, :counts[b]]``; they belong to the absolute positions
    ``starts[b] .. starts[b] + counts[b] - 1``. What lies beyond ``counts[b]`` is finite garbage.
    """

    row_ids: tuple[RowId | None, ...]  # [B]; None: idle slot, its count is 0
    starts: np.ndarray  # [B] int32, context length before this block
    counts: np.ndarray  # [B] int32
    x: mx.array  # [B, T, D]


@dataclass(frozen=True, slots=True)
class Drafts:
    """A drafter's answer. ``ids`` has width 0 when it has none: the round is then classic."""

    ids: mx.array  # [B, K - 1] int32
    has_taken: bool  # whether the features of the call are in the drafter's context now


class PendingDrafts(Protocol):
    """A draft under way."""

    def wait(self) -> Drafts:
        """Return the drafts; blocks only if they come from another process."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """Drafts that need no waiting: none, or on one device a node of the same lazy graph."""

    drafts: Drafts

    def wait(self) -> Drafts:
        """Return them."""
        return self.drafts


class Drafter(Protocol):
    """Proposes blocks from per-row contexts. Rows are known by id; slots follow the call's order."""

    @property
    def block_size(self) -> int:
        """Widest block, the anchor included."""
        ...

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        """Append features of rows that join (their whole prompt, from position 0) without drafting."""
        ...

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> PendingDrafts:
        """Take the waiting features, then draft ``width - 1`` tokens after each anchor [B]."""
        ...

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        """Forget rows that left the window."""
        ...

    def close(self, window_id: WindowId) -> None:
        """Forget the whole window."""
        ...
