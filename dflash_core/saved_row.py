"""One row's caches, copied out compactly and back in: what a saved prefix is made of.

A slice of a cache would share its buffer, and a shared buffer is copied whole by the next scatter into it;
a gather always makes an array of its own. Nothing here waits: copies are evaluated behind the forward
that wrote what they read.
"""

from dataclasses import dataclass

import mlx.core as mx

from dflash_core.row_cache import RowCaches


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Caches of a row of ``length`` tokens; arrays have one slot and no place to spare."""

    length: int
    keys: list[mx.array]  # each [1, Hkv, length, D]
    values: list[mx.array]  # each [1, Hkv, length, D]
    recurrent: list[mx.array]  # states [Lg, 1, Hv, Dv, Dk] and conv [Lg, 1, C - 1, N]; none of a drafter's

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.recurrent))


def copy_out(caches: RowCaches, slot: int) -> SavedRow:
    """A row's caches up to its length."""
    length, index = int(caches.lengths[slot]), mx.array([slot])
    arrays = caches.arrays
    saved = SavedRow(
        length,
        [mx.take(x[:, :, :length], index, axis=0) for x in arrays.keys],
        [mx.take(x[:, :, :length], index, axis=0) for x in arrays.values],
        [mx.take(x, index, axis=1) for x in (arrays.states, arrays.conv) if x.size > 0],
    )
    # Now, or the next scatter would find the caches shared with what is not copied yet.
    mx.async_eval(saved.keys, saved.values, saved.recurrent)
    return saved


def copy_in(caches: RowCaches, slot: int, saved: SavedRow) -> None:
    """Overwrite ``slot`` with a saved row; the caches grow if they must."""
    caches.reserve_length(saved.length)
    arrays = caches.take()
    for mine, theirs in ((arrays.keys, saved.keys), (arrays.values, saved.values)):
        for x, y in zip(mine, theirs, strict=True):
            x[slot, :, : saved.length] = y[0]
    recurrent = [x for x in (arrays.states, arrays.conv) if x.size > 0]
    for x, y in zip(recurrent, saved.recurrent, strict=True):
        x[:, slot] = y[:, 0]
    caches.put(arrays)
    caches.lengths[slot] = saved.length
