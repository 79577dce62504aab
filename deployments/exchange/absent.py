"""The ``Drafter`` of a target that has none: every round is classic."""

import mlx.core as mx

from dflash_core.prefixes import SavedContext
from dflash_core.protocols import Drafts, FeatureBlock, Ready
from dflash_core.request import RowId, WindowId


class NoDrafter:
    """Takes features and forgets them."""

    block_size = 1
    fingerprint = ""

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        """Nothing to keep."""

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        """No drafts."""
        return Ready(Drafts(mx.zeros((len(block.row_ids), 0), dtype=mx.int32), has_taken=True))

    def save(self, window_id: WindowId, row_id: RowId, length: int) -> SavedContext:
        """There is none, of any length."""
        return SavedContext(length, 0, None)

    def restore(self, window_id: WindowId, row_id: RowId, saved: SavedContext) -> None:
        """Nothing to begin with."""

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        """Nothing to forget."""

    def close(self, window_id: WindowId) -> None:
        """Nothing to forget."""
