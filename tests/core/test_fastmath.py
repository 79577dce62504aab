"""Elementwise functions against numpy's, in every dtype, up to arguments that overflow."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.ops import fastmath
from tests.core.engine_fixtures import eager

Function = Callable[[mx.array], mx.array]

SWEEP = np.concatenate(
    [np.linspace(-86.5, 87.5, 20001), np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)]
)
NUMPY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
}
FUNCTIONS: dict[str, Function] = {name: getattr(fastmath, name) for name in NUMPY}
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "limit"), [(mx.float32, 3e-7), (mx.float64, 2e-15)], ids=["float32", "float64"]
)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@PRECISIONS
@pytest.mark.parametrize("name", NUMPY)
def test_functions_are_accurate_over_their_whole_range(name: str, dtype: mx.Dtype, limit: float) -> None:
    x = mx.array(SWEEP, dtype=dtype)
    exact = NUMPY[name](np.array(x).astype(np.float64))
    actual = FUNCTIONS[name](x)
    assert actual.dtype == dtype
    assert (np.abs(np.array(actual) - exact) / np.abs(exact)).max() < limit


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64], ids=["float32", "float64"])
def test_the_exponential_of_zero_is_one(dtype: mx.Dtype) -> None:
    """A state that is kept is multiplied by it every round; growth by an ulp each would not average out."""
    assert np.array(fastmath.exp(mx.zeros(3, dtype=dtype))).tolist() == [1, 1, 1]
    assert np.array(fastmath.exp(mx.full((3,), -1e-9, dtype=dtype))).max() <= 1


def test_the_accuracy_asked_for_is_beyond_half_precision() -> None:
    """The control: bfloat16 would fail the sweep."""
    x = mx.array(SWEEP, dtype=mx.float32)
    coarse = np.array(mx.exp(x.astype(mx.bfloat16)).astype(mx.float32))
    exact = np.exp(np.array(x).astype(np.float64))
    assert (np.abs(coarse - exact) / exact).max() > 1e-3


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64], ids=["float32", "float64"])
def test_extreme_arguments_give_the_limits_and_no_nan(dtype: mx.Dtype) -> None:
    x = mx.array([-mx.inf, -1e30, -1e4, 1e4, 1e30, mx.inf], dtype=dtype)
    exp, sigmoid, softplus = (np.array(f(x)) for f in (fastmath.exp, fastmath.sigmoid, fastmath.softplus))
    assert (exp[:3] >= 0).all()
    assert (exp[:3] < 1e-37).all()
    assert (exp[3:] > 1e37).all()
    assert (sigmoid[:3] < 1e-37).all()
    assert (sigmoid[3:] == 1).all()
    assert (softplus[:3] < 1e-37).all()
    assert (softplus[3:] == np.array(x)[3:]).all()
    silu = np.array(fastmath.silu(x[2:4]))
    assert abs(silu[0]) < 1e-30
    assert silu[1] == 1e4


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float64, mx.bfloat16], ids=["float32", "float64", "bfloat16"]
)
def test_nan_is_never_turned_into_a_number(dtype: mx.Dtype) -> None:
    x = mx.array([[1.0, mx.nan, 2.0], [1.0, 2.0, 3.0]], dtype=dtype)
    for name, function in FUNCTIONS.items():
        is_nan = np.array(mx.isnan(function(x)))
        assert is_nan[0].tolist() == [False, True, False], name
        assert not is_nan[1].any(), name
    for whole in (fastmath.softmax, lambda x: fastmath.rms_norm(x, None, 1e-6)):
        is_nan = np.array(mx.isnan(whole(x)))
        assert is_nan[0].all()
        assert not is_nan[1].any()


@PRECISIONS
def test_softmax_is_numpys(dtype: mx.Dtype, limit: float) -> None:
    x = mx.array(np.random.default_rng(0).normal(0, 10, (50, 33)), dtype=dtype)
    exact = np.array(x).astype(np.float64)
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    actual = np.array(fastmath.softmax(x))
    assert np.abs(actual - exact).max() < limit
    assert np.abs(actual.sum(-1) - 1).max() < 20 * limit


def test_softmax_gives_what_is_masked_nothing() -> None:
    scores = mx.array([[2.0, -1e30, 1.0, -1e30], [-1e30, -1e30, -1e30, 5.0]])
    weights = np.array(fastmath.softmax(scores))
    assert (weights[np.array(scores) < -1e29] < 1e-37).all()
    assert weights[1, 3] == 1


@PRECISIONS
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm_is_numpys(dtype: mx.Dtype, limit: float, scale: float) -> None:
    rng = np.random.default_rng(1)
    x, weight = (mx.array(rng.normal(0, s, n), dtype=dtype) for s, n in ((scale, (40, 48)), (1.0, 48)))
    wide = np.array(x).astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    for w in (None, weight):
        actual = fastmath.rms_norm(x, w, 1e-6)
        assert actual.dtype == dtype
        exact = normed if w is None else normed * np.array(weight).astype(np.float64)
        assert (np.abs(np.array(actual) - exact) <= 2 * limit * np.abs(exact) + 1e-30).all()


@pytest.mark.parametrize("name", NUMPY)
def test_half_precision_stays_half_precision(name: str) -> None:
    x = mx.array(np.linspace(-8, 8, 101), dtype=mx.bfloat16)
    actual = FUNCTIONS[name](x)
    assert actual.dtype == mx.bfloat16
    exact = NUMPY[name](np.array(x.astype(mx.float32)).astype(np.float64))
    wide = np.array(actual.astype(mx.float32))
    assert (np.abs(wide - exact) <= 0.02 * np.abs(exact) + 0.01).all()
