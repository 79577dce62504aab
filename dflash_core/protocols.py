"""The two parts that the round loop is written against.

In-process objects implement both (``dflash_core.target``, ``dflash_core.drafter``); adapters in
``deployments`` implement ``Drafter`` over Ray. A window lives where its target does, so that no adapter
implements ``Target``. Everything here is called on the MLX thread.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from dflash_core.request import RowId, WindowId

if TYPE_CHECKING:
    from dflash_core.row_cache import RowCaches
    from dflash_core.sampling import SamplingArrays
    from dflash_core.target import BlockInput, PromptScoring, Verdict
    from dflash_core.text.grammar import Grammars


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


class Target(Protocol):
    """Reads prompts and checks blocks, all rows in one forward. Rows are slots of its caches."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of a row, its budget included."""
        ...

    @property
    def feature_size(self) -> int:
        """Width of a projected feature."""
        ...

    @property
    def feature_dtype(self) -> mx.Dtype:
        """Dtype of a projected feature."""
        ...

    @property
    def grammars(self) -> "Grammars | None":
        """Grammars of its vocabulary; None: a row can have no grammar."""
        ...

    def new_caches(self, num_slots: int, capacity: int) -> "RowCaches":
        """Empty caches."""
        ...

    def prefill(
        self,
        caches: "RowCaches",
        tokens: np.ndarray,
        counts: np.ndarray,
        sampling: "SamplingArrays",
        scoring: "PromptScoring | None" = None,
    ) -> "Verdict":
        """Read ``counts`` [B] of ``tokens`` [B, T] after each slot's length; advances the caches."""
        ...

    def verify(self, caches: "RowCaches", block: "BlockInput", drafts: mx.array, accept: str) -> "Verdict":
        """Check ``drafts`` [B, K - 1] after the anchors and commit what the policy keeps.

        The caller advances ``caches.lengths`` from the outcome.
        """
        ...
