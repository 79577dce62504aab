"""The target's per-row caches: keys and values left-aligned, recurrent states, and host lengths.

Slot index along S is absolute position, so rejecting tokens is only a smaller length. MLX does not
range-check a scatter (one index too far corrupts another row or the process), so every forward is
preceded by ``reserve``: the host knows all lengths, idle slots included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_core.models.target import CacheArrays

FRESH = -1  # in a layout: a slot that starts empty


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one row's caches."""

    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    num_delta_layers: int
    num_v_heads: int
    v_dim: int
    k_dim: int
    conv_window: int  # C - 1
    conv_dim: int
    dtype: mx.Dtype  # keys, values and convolution inputs
    state_dtype: mx.Dtype

    def bytes_per_row(self, capacity: int) -> int:
        """Bytes of one row's caches at a capacity in tokens."""
        kv = 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * capacity
        conv = self.num_delta_layers * self.conv_window * self.conv_dim
        state = self.num_delta_layers * self.num_v_heads * self.v_dim * self.k_dim
        return (kv + conv) * self.dtype.size + state * self.state_dtype.size


def bucket_rows(num_rows: int) -> int:
    """Smallest power of two that holds ``num_rows`` (at least 1): few shapes, few graphs."""
    return 1 << max(0, num_rows - 1).bit_length()


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ... up to the bucket of ``max_rows``."""
    return [1 << power for power in range(bucket_rows(max_rows).bit_length())]


def bucket_capacity(num_tokens: int) -> int:
    """Smallest of 128, 192, 256, 384, 512, 768, ... that holds ``num_tokens``."""
    size = 128
    while size < num_tokens:
        if size * 3 // 2 >= num_tokens:
            return size * 3 // 2
        size *= 2
    return size


class RowCaches:
    """Caches of ``num_slots`` slots. Arrays are replaced, never shared: MLX then writes in place."""

    def __init__(self, shape: CacheShape, num_slots: int, capacity: int):
        self.shape = shape
        self.lengths = np.zeros(num_slots, dtype=np.int32)
        self.arrays = self._zeros(num_slots, capacity)

    def _zeros(self, num_slots: int, capacity: int) -> CacheArrays:
        s = self.shape
        kv = (num_slots, s.num_kv_heads, capacity, s.head_dim)
        return CacheArrays(
            keys=[mx.zeros(kv, dtype=s.dtype) for _ in range(s.num_attention_layers)],
            values=[mx.zeros(kv, dtype=s.dtype) for _ in range(s.num_attention_layers)],
            states=mx.zeros(
                (s.num_delta_layers, num_slots, s.num_v_heads, s.v_dim, s.k_dim), dtype=s.state_dtype
            ),
            conv=mx.zeros((s.num_delta_layers, num_slots, s.conv_window, s.conv_dim), dtype=s.dtype),
        )

    @property
    def num_slots(self) -> int:
        """Slots, idle ones included."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Tokens that fit a slot."""
        return self.arrays.keys[0].shape[2] if self.arrays.keys else 1 << 30

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.num_slots * self.shape.bytes_per_row(self.capacity if self.arrays.keys else 0)

    def take(self) -> CacheArrays:
        """Hand the arrays to a forward, which must be followed by ``put``; no reference stays here."""
        arrays = self.arrays
        self.arrays = CacheArrays([], [], mx.zeros(0), mx.zeros(0))
        return arrays

    def put(self, arrays: CacheArrays) -> None:
        """Take a forward's result."""
        self.arrays = arrays

    def reserve(self, width: int) -> None:
        """Grow so that ``width`` more tokens fit after every slot's length, idle ones too."""
        self.reserve_length(int(self.lengths.max(initial=0)) + width)

    def reserve_length(self, needed: int) -> None:
        """Grow until a slot holds ``needed`` tokens."""
        if self.arrays.keys and needed > self.capacity:
            self._resize(bucket_capacity(needed))
        assert needed <= self.capacity, (needed, self.capacity)

    def _resize(self, capacity: int) -> None:
        self.arrays = CacheArrays(
            keys=[_fit(k, capacity) for k in self.arrays.keys],
            values=[_fit(v, capacity) for v in self.arrays.values],
            states=self.arrays.states,
            conv=self.arrays.conv,
        )

    def arrange(self, layout: Sequence[int], width: int) -> None:
        """Lay slots out anew: slot i becomes the old slot ``layout[i]``, or empty where ``FRESH``.

        Capacity is chosen again for the rows that stay plus ``width``, so it also shrinks.
        """
        source = np.asarray(layout, dtype=np.int32)
        fresh = source == FRESH
        source = np.where(fresh, 0, source)
        self.lengths = np.where(fresh, 0, self.lengths[source]).astype(np.int32)
        capacity = bucket_capacity(int(self.lengths.max(initial=0)) + width)
        index, empty = mx.array(source), mx.array(fresh)

        def pick(x: mx.array, axis: int) -> mx.array:
            if x.size == 0:  # a drafter has no recurrent layers, and CUDA cannot take an empty array
                shape = list(x.shape)
                shape[axis] = len(source)
                return mx.zeros(shape, dtype=x.dtype)
            mask = empty.reshape((-1,) + (1,) * (x.ndim - axis - 1))
            return mx.where(mask, mx.zeros((), dtype=x.dtype), mx.take(x, index, axis=axis))

        self.arrays = CacheArrays(
            keys=[pick(_fit(k, capacity), 0) for k in self.arrays.keys],
            values=[pick(_fit(v, capacity), 0) for v in self.arrays.values],
            states=pick(self.arrays.states, 1),
            conv=pick(self.arrays.conv, 1),
        )

    def reset(self, slot: int) -> None:
        """Empty a slot. Keys and values behind a length are never read; recurrent states are."""
        self.lengths[slot] = 0
        arrays = self.take()
        for x in _recurrent(arrays):
            x[:, slot] = 0
        self.put(arrays)

    def clear(self, slot: int) -> None:
        """Zero a slot: after an error its garbage may not be finite, and 0 x NaN is NaN."""
        self.lengths[slot] = 0
        arrays = self.take()
        for x in (*arrays.keys, *arrays.values):
            x[slot] = 0
        for x in _recurrent(arrays):
            x[:, slot] = 0
        self.put(arrays)

    def copy_row(self, slot: int, source: "RowCaches", source_slot: int) -> None:
        """Overwrite ``slot`` with a row of another set of caches; capacity must already suffice."""
        length = int(source.lengths[source_slot])
        assert length <= self.capacity, (length, self.capacity)
        width = min(source.capacity, self.capacity)  # a bucket, not the length: fewer shapes
        arrays = self.take()
        for mine, theirs in ((arrays.keys, source.arrays.keys), (arrays.values, source.arrays.values)):
            for x, y in zip(mine, theirs, strict=True):
                x[slot, :, :width] = y[source_slot, :, :width]
        for x, y in zip(_recurrent(arrays), _recurrent(source.arrays), strict=True):
            x[:, slot] = y[:, source_slot]
        self.put(arrays)
        self.lengths[slot] = length


def _recurrent(arrays: CacheArrays) -> list[mx.array]:
    """Recurrent states and convolution windows, slots on the second axis; none of a drafter's."""
    return [x for x in (arrays.states, arrays.conv) if x.size > 0]


def _fit(x: mx.array, capacity: int) -> mx.array:
    """Cut or zero-pad the S axis of [B, H, S, D]."""
    size = x.shape[2]
    if size >= capacity:
        return x if size == capacity else x[:, :, :capacity]
    return mx.pad(x, [(0, 0), (0, 0), (0, capacity - size), (0, 0)])
