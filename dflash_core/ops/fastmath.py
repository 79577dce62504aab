"""Elementwise functions that MLX's CPU backend computes slowly or coarsely, and their way around.

MLX 0.32 on Linux CPU takes 10 to 14 ns an element for exp, sigmoid and tanh: more than the matmuls
beside them. An exponential out of multiply, add, floor and an integer view is fused by ``mx.compile``
and vectorised by the C++ compiler. In float64, which only tests use, the same code with a longer
series replaces MLX's exp and rms_norm, which are exact to float32 only. Every other device and dtype
uses MLX's own.
"""

import math

import mlx.core as mx

_LOG2_E = 1.4426950408889634
# ln 2 in two parts (Cody and Waite): the first has few bits, so n * high is exact.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.4286068203094172e-06
_SERIES_FLOAT64 = tuple(1.0 / math.factorial(i) for i in range(14))
# Least maximum relative error (1.1e-7) over |f| <= ln2 / 2 of those with e**0 = 1, so that a state which is
# kept does not grow round by round: two terms fewer than Taylor's.
_SERIES_FLOAT32 = (
    1.0,
    1.0,
    0.49999230308291864,
    0.1666711538936042,
    0.041890331714981806,
    0.008312501296769104,
)
# Adding this rounds a float32 to an integer that then lies in its low bits; floor is not vectorised.
_ROUND_FLOAT32 = 12582912.0  # 1.5 * 2^23

# The series is several kernels where MLX's own is part of one: it pays from about here on.
_SMALLEST_SERIES = 2048


def exp(x: mx.array) -> mx.array:
    """e**x, elementwise; relative error below 3e-7 in float32 on CPU.

    On that path the argument is clipped to -87 .. 88: no infinity, and 1e-38 instead of 0.
    """
    return _series_exp(x) if _wants_series(x) else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e**-x), elementwise."""
    return 1.0 / (1.0 + _series_exp(-x)) if _wants_series(x) else mx.sigmoid(x)


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), elementwise."""
    return x * sigmoid(x)


def softmax(x: mx.array) -> mx.array:
    """Softmax over the last axis. A fully masked row (all -inf) is the caller's error."""
    if not _wants_series(x):
        return mx.softmax(x, axis=-1, precise=True)
    weights = _series_exp(x - mx.max(x, axis=-1, keepdims=True))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def softplus(x: mx.array) -> mx.array:
    """log(1 + e**x), elementwise, without overflow."""
    if not _wants_series(x):
        return mx.logaddexp(x, mx.zeros_like(x))
    return mx.maximum(x, 0.0) + mx.log1p(_series_exp(-mx.abs(x)))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    if x.dtype != mx.float64:
        return mx.fast.rms_norm(x, weight, eps)
    scaled = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return scaled if weight is None else scaled * weight


def _wants_series(x: mx.array) -> bool:
    is_large = x.size >= _SMALLEST_SERIES
    return x.dtype == mx.float64 or (x.dtype == mx.float32 and is_large and mx.default_device() == mx.cpu)


def _series_exp(x: mx.array) -> mx.array:
    x = mx.minimum(mx.maximum(x, -87.0), 88.0)
    if x.dtype == mx.float64:
        n = mx.floor(x * _LOG2_E + 0.5)
        return _series(x, n, _SERIES_FLOAT64) * ((n.astype(mx.int64) + 1023) << 52).view(mx.float64)
    shifted = x * _LOG2_E + _ROUND_FLOAT32
    # 2**n by moving n from the low bits into the exponent; the constant's own bits fall out on the left.
    power_of_two = ((shifted.view(mx.int32) + 127) << 23).view(mx.float32)
    return _series(x, shifted - _ROUND_FLOAT32, _SERIES_FLOAT32) * power_of_two


def _series(x: mx.array, n: mx.array, terms: tuple[float, ...]) -> mx.array:
    """e**(x - n ln2) by a polynomial, in pairs of terms.

    Pairs (Estrin's scheme) make the expression shallow: MLX fuses at most 11 levels into one kernel.
    """
    f = (x - n * _LN2_HIGH) - n * _LN2_LOW
    square = f * f
    total = f * terms[-1] + terms[-2]
    for i in range(len(terms) - 4, -1, -2):
        total = total * square + (f * terms[i + 1] + terms[i])
    return total
