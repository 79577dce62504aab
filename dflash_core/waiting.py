"""Features that a window's drafter has not taken yet, per slot, in order.

A drafted round leaves one block behind, which goes out with the next draft as it is. Classic rounds
leave one feature each; they pile up here, so that context length + waiting = target length always.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from dflash_core.row_cache import FRESH, bucket_rows


class WaitingFeatures:
    """Per slot, what the drafter's context lacks."""

    def __init__(self, num_slots: int, feature_size: int, dtype: mx.Dtype):
        self._feature_size, self._dtype = feature_size, dtype
        self._blocks: list[tuple[mx.array, np.ndarray]] = []  # ([B, T, D], counts [B])
        self._num_slots = num_slots

    @property
    def counts(self) -> np.ndarray:
        """Waiting features per slot [B] int32."""
        total = np.zeros(self._num_slots, dtype=np.int32)
        for _, counts in self._blocks:
            total += counts
        return total

    def add(self, x: mx.array, counts: np.ndarray) -> None:
        """Append a round's features [B, K, D], ``counts`` [B] of them real."""
        self._blocks.append((x, counts))

    def clear(self) -> None:
        """The drafter has taken everything."""
        self._blocks.clear()

    def forget(self, slot: int, *, scrub: bool) -> None:
        """A slot's row left. ``scrub`` zeroes what it leaves, which may not be finite."""
        for i, (x, counts) in enumerate(self._blocks):
            counts[slot] = 0
            if scrub:
                is_slot = (mx.arange(self._num_slots) == slot)[:, None, None]
                self._blocks[i] = (mx.where(is_slot, mx.zeros((), dtype=x.dtype), x), counts)

    def arrange(self, layout: Sequence[int]) -> None:
        """Lay slots out anew, as ``RowCaches.arrange``."""
        source = np.asarray(layout, dtype=np.int32)
        index = np.where(source == FRESH, 0, source)
        for i, (x, counts) in enumerate(self._blocks):
            moved = np.where(source == FRESH, 0, counts[index]).astype(np.int32)
            self._blocks[i] = (x[mx.array(index)], moved)
        self._num_slots = len(layout)

    def merged(self) -> tuple[mx.array, np.ndarray]:
        """All waiting features as one block: x [B, T, D] and counts [B]; T is a power of two."""
        if not self._blocks:
            x = mx.zeros((self._num_slots, 1, self._feature_size), dtype=self._dtype)
            return x, np.zeros(self._num_slots, dtype=np.int32)
        if len(self._blocks) > 1:
            self._blocks = [self._merge()]
        return self._blocks[0]

    def _merge(self) -> tuple[mx.array, np.ndarray]:
        total = self.counts
        T = bucket_rows(int(total.max(initial=1)))
        source = np.zeros((self._num_slots, T), dtype=np.int32)
        begin, filled = 0, np.zeros(self._num_slots, dtype=np.int32)
        for x, counts in self._blocks:
            for slot in np.flatnonzero(counts):
                stop = filled[slot] + counts[slot]
                source[slot, filled[slot] : stop] = np.arange(begin, begin + counts[slot])
                filled[slot] = stop
            begin += x.shape[1]
        everything = mx.concatenate([x for x, _ in self._blocks], axis=1)
        return mx.take_along_axis(everything, mx.array(source)[..., None], axis=1), total
