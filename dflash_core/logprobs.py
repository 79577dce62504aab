"""Log-probabilities of what the target chose, from the forward that chose it.

They are *raw*: the target's own distribution, before biases, penalties, temperature and truncation. Made
only for the rows of a window that ask. On their way to the host they ride behind the round's integers as
one int32 array, so a round still has one blocking read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_core.events import TokenLogprobs
from dflash_core.row_cache import bucket_rows

_BUCKETS = (0, 1, 5, 20)  # of likeliest tokens: each has a compiled graph of its own


@dataclass(frozen=True, slots=True)
class Asked:
    """Which slots of a window want numbers, and the most likeliest tokens that any of them wants."""

    slots: tuple[int, ...]  # ascending
    num_top: int  # a bucket

    @classmethod
    def of(cls, num_tops: Sequence[int | None], vocab_size: int) -> "Asked | None":
        """What each slot asks for; None: nobody asks."""
        wanted = {slot: num_top for slot, num_top in enumerate(num_tops) if num_top is not None}
        if not wanted:
            return None
        most = max(wanted.values())
        return cls(tuple(wanted), min(vocab_size, next((n for n in _BUCKETS if n >= most), most)))

    def padded(self) -> mx.array:
        """The slots [R] int32, R a power of two; the last one fills up."""
        count = bucket_rows(len(self.slots))
        return mx.array([*self.slots, *([self.slots[-1]] * (count - len(self.slots)))], dtype=mx.int32)


def measure(logits: mx.array, tokens: mx.array, num_top: int) -> mx.array:
    """Logits [R, K, V] and tokens [R, K] to numbers [R, K, 1 + 2N] int32.

    Per place the bits of the token's log-probability, then the N likeliest tokens in no order, then the
    bits of theirs.
    """
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, tokens[..., None], axis=-1) - norm
    columns = [own.view(mx.int32)]
    if num_top > 0:
        top = mx.argpartition(-logits, kth=num_top - 1, axis=-1)[..., :num_top].astype(mx.int32)
        columns += [top, (mx.take_along_axis(logits, top, axis=-1) - norm).view(mx.int32)]
    return mx.concatenate(columns, axis=-1)


def unpack(numbers: np.ndarray, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Numbers [K, 1 + 2N] of one row to what it wants of them, the likeliest tokens first."""
    measured = (numbers.shape[1] - 1) // 2
    own = np.ascontiguousarray(numbers[:, 0]).view(np.float32).tolist()
    tops = numbers[:, 1 : 1 + measured].tolist()
    values = np.ascontiguousarray(numbers[:, 1 + measured :]).view(np.float32).tolist()
    return tuple(
        TokenLogprobs(logprob, tuple(sorted(zip(top, value, strict=True), key=_likeliest)[:num_top]))
        for logprob, top, value in zip(own, tops, values, strict=True)
    )


def _likeliest(pair: tuple[int, float]) -> tuple[float, int]:
    token, logprob = pair
    return -logprob, token
