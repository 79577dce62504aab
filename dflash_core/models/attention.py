"""Attention over left-aligned row caches: slot index is absolute position, lengths do the rest."""

import mlx.core as mx

from dflash_core.ops import fastmath


def write_at(cache: mx.array, new: mx.array, positions: mx.array) -> mx.array:
    """Write ``new`` [B, H, T, D] into ``cache`` [B, H, S, D] at each row's ``positions`` [B, T].

    MLX does not range-check: callers assert that the largest position is below S beforehand.
    """
    index = mx.broadcast_to(positions[:, None, :, None], new.shape)
    return mx.put_along_axis(cache, index, new, axis=2)


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, scale: float) -> mx.array:
    """Grouped-query attention: q [B, Hq, T, D], k and v [B, Hkv, S, D], boolean mask [B, 1, T, S].

    Every query must see at least one key. Returns [B, T, Hq * D].
    """
    B, Hq, T, D = q.shape
    if mx.default_device() == mx.cpu and q.dtype in (mx.float32, mx.float64):
        # MLX's CPU softmax takes longer than the products around it.
        Hkv, S = k.shape[1], k.shape[2]
        grouped = (q * scale).reshape(B, Hkv, (Hq // Hkv) * T, D)
        scores = (grouped @ k.swapaxes(-1, -2)).reshape(B, Hq, T, S)
        scores = mx.where(mask, scores, mx.array(-1e30, dtype=scores.dtype))
        weights = fastmath.softmax(scores).reshape(B, Hkv, (Hq // Hkv) * T, S)
        output = (weights @ v).reshape(B, Hq, T, D)
    else:
        output = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return output.swapaxes(1, 2).reshape(B, T, Hq * D)


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """[B, T, H * D] to [B, T, H, D]."""
    B, T, width = x.shape
    return x.reshape(B, T, num_heads, width // num_heads)
