"""How many drafts of a block each row keeps. Pure functions on arrays.

``drafted`` tokens are compared with the target's own ``chosen`` tokens; ``walked`` is the number of
leading matches, ``accepted`` what the policy keeps of them. The token after the accepted prefix, the
bonus, is always the target's own: it comes on top.
"""

from collections.abc import Callable

import mlx.core as mx

AcceptPolicy = Callable[[mx.array, mx.array], mx.array]  # (walked [B], is_live [B]) -> kept [B]


def walk(drafts: mx.array, chosen: mx.array) -> mx.array:
    """Leading drafts [B, K - 1] equal to the target's tokens [B, K]: counts [B] int32."""
    if drafts.shape[1] == 0:  # MLX's CUDA backend divides by the size of an empty array
        return mx.zeros((chosen.shape[0],), dtype=mx.int32)
    matches = (drafts == chosen[:, :-1]).astype(mx.int32)
    return mx.sum(mx.cumprod(matches, axis=1), axis=1).astype(mx.int32)


def per_row(walked: mx.array, is_live: mx.array) -> mx.array:
    """Every row keeps exactly what it earned."""
    return walked


def clamp(walked: mx.array, is_live: mx.array) -> mx.array:
    """Every row is cut to the shortest live row's count: the baseline to measure against."""
    shortest = mx.min(mx.where(is_live, walked, mx.array(2**30, dtype=walked.dtype)))
    return mx.minimum(walked, shortest)


ACCEPT_POLICIES: dict[str, AcceptPolicy] = {"per_row": per_row, "clamp": clamp}
