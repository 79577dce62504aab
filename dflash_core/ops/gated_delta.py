"""The gated delta rule over a short block, in closed form, with a journal instead of a new state.

With G the cumulative log decay of the block, S0 the state before it and k, v, beta per token,

    L[t, i] = beta_t exp(G_t - G_i) k_t.k_i   (i < t)        R_t = beta_t (v_t - exp(G_t) S0 k_t)
    delta   = (I + L)^-1 R
    y_t     = exp(G_t) S0 q_t + sum_{i<=t} exp(G_t - G_i) (k_i.q_t) delta_i
    S_n     = exp(G_n) S0 + sum_{i<=n} exp(G_n - G_i) delta_i k_i^T

so a verify writes no state: the journal (delta, k, G) gives the state after *any* number of tokens,
a different one for each row. (The recurrence is Yang et al., arXiv 2412.06464.)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from dflash_core.ops import fastmath

MAX_BLOCK = 64  # the recursion was checked to stay at 1e-7 up to here; longer runs go by chunks
PromptWay = Callable[..., tuple[mx.array, mx.array]]
"""(q, k, v, log_g, beta, state, counts) to outputs and state: ``run_chunks`` or ``run_kernel``."""

_TIMED_TOKENS = 512
_FORGOTTEN = -40.0  # e**-40 is nothing; a deeper decay would only cost the cumulative sum its digits


@dataclass(frozen=True, slots=True)
class Journal:
    """What rebuilds the recurrent state after any prefix of the block. Layers may be stacked in front."""

    delta: mx.array  # [..., B, Hv, T, Dv]
    k: mx.array  # [..., B, Hk, T, Dk]
    decay: mx.array  # [..., B, Hv, T] cumulative log decay G, inclusive


def log_decay(a: mx.array, rate: mx.array, dt_bias: mx.array) -> mx.array:
    """Log of the decay per token and head, [B, T, Hv]; never the log of g, which underflows.

    ``rate`` [Hv] is ``-exp(A_log)``.
    """
    return rate * fastmath.softplus(a.astype(rate.dtype) + dt_bias.astype(rate.dtype))


def run_block(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, Journal]:
    """Outputs of a block of at most ``MAX_BLOCK`` tokens and its journal; ``state`` is only read.

    q, k [B, T, Hk, Dk] (normalised, q scaled) · v [B, T, Hv, Dv] · log_g, beta [B, T, Hv] ·
    state [B, Hv, Dv, Dk]. Returns y [B, T, Hv, Dv] in the state's dtype.
    """
    B, T, Hk, _ = q.shape
    Hv, Dv = v.shape[-2:]
    group = Hv // Hk
    kq = mx.concatenate([k, q], axis=1).swapaxes(1, 2)  # [B, Hk, 2T, Dk]
    k = kq[:, :, :T]
    decay = mx.cumsum(mx.maximum(log_g, _FORGOTTEN), axis=1).swapaxes(1, 2)  # [B, Hv, T]
    beta = beta.swapaxes(1, 2)[..., None]  # [B, Hv, T, 1]

    # Everything pairwise inside the block, and everything against S0, in one product each.
    pairs = (kq @ k.swapaxes(-1, -2))[:, :, None]  # [B, Hk, 1, 2T, T]
    from_state = kq[:, :, None] @ state.reshape(B, Hk, group, Dv, -1).swapaxes(-1, -2)
    from_state = from_state.reshape(B, Hv, 2 * T, Dv)
    from_start = fastmath.exp(decay)[..., None]  # exp(G_t) [B, Hv, T, 1]
    R = beta * (v.swapaxes(1, 2) - from_start * from_state[..., :T, :])
    if T == 1:  # a classic round: L is empty
        own = mx.broadcast_to(pairs[..., 1:, :], (B, Hk, group, 1, 1)).reshape(B, Hv, 1, 1)
        y = from_start * from_state[..., 1:, :] + own * R
        return y.swapaxes(1, 2), Journal(delta=R, k=k, decay=decay)

    # exp(G_t - G_i), zeroed above the diagonal only after the exponential.
    relative = fastmath.exp(mx.minimum(decay[..., :, None] - decay[..., None, :], 0.0))
    relative = relative.reshape(B, Hk, group, T, T)
    lower, strict = _triangles(T)
    zero = mx.zeros((), dtype=relative.dtype)
    L = mx.where(strict, relative * pairs[..., :T, :], zero).reshape(B, Hv, T, T) * beta
    A = mx.where(lower, relative * pairs[..., T:, :], zero).reshape(B, Hv, T, T)

    delta = inverse_unit_lower(L) @ R  # [B, Hv, T, Dv]
    y = from_start * from_state[..., T:, :] + A @ delta
    return y.swapaxes(1, 2), Journal(delta=delta, k=k, decay=decay)


def inverse_unit_lower(strict: mx.array) -> mx.array:
    """Inverse of I + L for a strictly lower triangular L [..., T, T], by 2x2 block recursion.

    ``X - X (M * L) X`` with M the lower left quarters of the diagonal blocks is one level of
    ``[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]`` for all diagonal blocks at once.
    Powers of L would be cheaper and lose everything with repeated keys.
    """
    T = strict.shape[-1]
    identity: np.ndarray = np.eye(T)
    inverse = mx.array(identity, dtype=strict.dtype)
    for level, quarter in enumerate(_quarters(T)):
        C = mx.where(quarter, strict, mx.zeros((), dtype=strict.dtype))
        # At the first level the diagonal blocks are 1x1 and their inverses 1.
        inverse = inverse - (C if level == 0 else inverse @ C @ inverse)
    return inverse


def _triangles(T: int) -> tuple[mx.array, mx.array]:
    """Masks [T, T] of i <= t and i < t; from numpy, so that a compiled region holds them as constants."""
    inclusive: np.ndarray = np.tri(T, dtype=bool)
    exclusive: np.ndarray = np.tri(T, k=-1, dtype=bool)
    return mx.array(inclusive), mx.array(exclusive)


def _quarters(T: int) -> list[mx.array]:
    """Per level the lower left quarters of the diagonal blocks of 2, 4, 8, ... [T, T]."""
    rows, columns = np.arange(T)[:, None], np.arange(T)[None]
    masks: list[mx.array] = []
    size = 1
    while size < T:
        same_pair = rows // (2 * size) == columns // (2 * size)
        mask: np.ndarray = same_pair & (rows // size > columns // size)
        masks.append(mx.array(mask))
        size *= 2
    return masks


def state_after(journal: Journal, state: mx.array, counts: mx.array) -> mx.array:
    """The state after the first ``counts`` tokens [B] of each row's block; 0 leaves it as it was.

    Works on one layer or on layers stacked in front; ``state`` [..., B, Hv, Dv, Dk].
    """
    T = journal.decay.shape[-1]
    kept = mx.arange(T) < counts[:, None]  # [B, T]
    last = mx.maximum(counts - 1, 0)[:, None, None]  # [B, 1, 1]
    index = mx.broadcast_to(last, (*journal.decay.shape[:-1], 1))
    total = mx.take_along_axis(journal.decay, index, axis=-1)  # G_n [..., B, Hv, 1]
    zero = mx.zeros((), dtype=total.dtype)
    total = mx.where(counts[:, None, None] > 0, total, zero)
    weights = fastmath.exp(mx.minimum(total - journal.decay, 0.0))
    weights = mx.where(kept[:, None], weights, zero)  # [..., B, Hv, T]
    # Rejected tokens may hold garbage, and 0 x NaN is NaN: select, do not multiply.
    delta = mx.where(kept[:, None, :, None], journal.delta * weights[..., None], zero)
    k = mx.where(kept[:, None, :, None], journal.k, zero)
    *front, Hv, Dv, Dk = state.shape
    Hk = k.shape[-3]
    grouped = delta.reshape(*front, Hk, Hv // Hk, T, Dv).swapaxes(-1, -2)
    added = (grouped @ k[..., None, :, :]).reshape(state.shape)
    return fastmath.exp(total)[..., None] * state + added


@cache
def prompt_way(num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int) -> PromptWay:
    """What reads prompts of these heads fastest here: the closed form or, on Metal, perhaps MLX's kernel.

    On Metal both are timed once, outside of any compiled region. Off Metal MLX's operation is a loop over
    tokens, on CUDA too (0.32.4), and is not tried.
    """
    is_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    if not is_metal or k_dim % 32:
        return run_chunks
    B, T = 1, _TIMED_TOKENS
    q = k = mx.full((B, T, num_k_heads, k_dim), k_dim**-0.5)
    v = mx.ones((B, T, num_v_heads, v_dim))
    log_g, beta = mx.full((B, T, num_v_heads), -0.1), mx.full((B, T, num_v_heads), 0.5)
    state, counts = mx.zeros((B, num_v_heads, v_dim, k_dim)), mx.array([T])
    return min((run_kernel, run_chunks), key=lambda way: _seconds(way, q, k, v, log_g, beta, state, counts))


def _seconds(way: PromptWay, *inputs: mx.array) -> float:
    """The best of three, after one that compiles."""
    seconds: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(*way(*inputs))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def run_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array,
    counts: mx.array,
) -> tuple[mx.array, mx.array]:
    """``run_chunks`` by ``mx.fast.gated_delta_update``, which skips what the mask leaves out."""
    mask = mx.arange(q.shape[1]) < counts[:, None]
    y, after = mx.fast.gated_delta_update(q, k, v, mx.exp(log_g), beta, state, mask)
    return y.astype(state.dtype), after


def run_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array,
    counts: mx.array,
) -> tuple[mx.array, mx.array]:
    """Prefill: outputs for T tokens and the state after each row's first ``counts`` [B] of them.

    Shapes as ``run_block``, T unbounded. Outputs beyond a row's count are garbage.
    """
    outputs: list[mx.array] = []
    for begin in range(0, q.shape[1], MAX_BLOCK):
        part = slice(begin, begin + MAX_BLOCK)
        y, journal = run_block(q[:, part], k[:, part], v[:, part], log_g[:, part], beta[:, part], state)
        size = y.shape[1]
        state = state_after(journal, state, mx.clip(counts - begin, 0, size))
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)), state
