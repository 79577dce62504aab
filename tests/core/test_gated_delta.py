"""The closed form of the gated delta rule against a float64 loop over tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.ops import gated_delta
from dflash_core.ops.gated_delta import (
    MAX_BLOCK,
    Journal,
    inverse_unit_lower,
    log_decay,
    prompt_way,
    run_block,
    run_chunks,
    run_kernel,
    state_after,
)
from tests.core.engine_fixtures import eager

KINDS = (
    "random",
    "repeated key",
    "repeated word",
    "full beta",
    "long memory",
    "forgetful",
    "forgets at times",
)
LENGTHS = (1, 2, 3, 8, 13, 16, 32, 64)
TOLERANCE = {mx.float64: 1e-9, mx.float32: 1e-4}


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@dataclass(frozen=True)
class Inputs:
    """float64 inputs of the recurrence, shaped as ``run_block`` wants them."""

    q: np.ndarray  # [B, T, Hk, Dk]
    k: np.ndarray  # [B, T, Hk, Dk]
    v: np.ndarray  # [B, T, Hv, Dv]
    log_g: np.ndarray  # [B, T, Hv]
    beta: np.ndarray  # [B, T, Hv]
    state: np.ndarray  # [B, Hv, Dv, Dk]

    def arrays(self, dtype: mx.Dtype) -> tuple[mx.array, ...]:
        parts = (self.q, self.k, self.v, self.log_g, self.beta, self.state)
        return tuple(mx.array(x, dtype=dtype) for x in parts)

    def with_garbage(self, counts: np.ndarray, rng: np.random.Generator) -> "Inputs":
        """Other finite inputs at and after each row's count."""
        other = make("random", self.q.shape[1], rng, *self._sizes())
        keep = np.arange(self.q.shape[1]) < counts[:, None]

        def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.where(keep.reshape(*keep.shape, *[1] * (a.ndim - 2)), a, b)

        return Inputs(
            q=mix(self.q, other.q),
            k=mix(self.k, other.k),
            v=mix(self.v, 1e4 * other.v),
            log_g=mix(self.log_g, 100 * other.log_g),
            beta=mix(self.beta, other.beta),
            state=self.state,
        )

    def _sizes(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.k.shape[2], self.v.shape[2]


def make(
    kind: str,
    T: int,
    rng: np.random.Generator,
    B: int = 2,
    Hk: int = 2,
    Hv: int = 4,
    Dk: int = 16,
    Dv: int = 8,
) -> Inputs:
    def unit(shape: tuple[int, ...]) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = unit((B, T, Hk, Dk)) / Dk**0.5, unit((B, T, Hk, Dk))
    v = rng.normal(size=(B, T, Hv, Dv))
    log_g = -rng.uniform(0.01, 1.5, (B, T, Hv))
    beta = rng.uniform(0.05, 0.95, (B, T, Hv))
    if kind in ("repeated key", "repeated word"):
        k = np.broadcast_to(k[:, :1], k.shape)
        log_g = np.full_like(log_g, -1e-4)
    if kind == "repeated word":
        q, v, beta = (np.broadcast_to(x[:, :1], x.shape) for x in (q, v, beta))
    if kind == "full beta":
        beta = np.full_like(beta, 1 - 1e-9)
    if kind == "long memory":
        log_g = np.full_like(log_g, -1e-7)
    if kind == "forgetful":
        log_g = np.full_like(log_g, -1e4)
    if kind == "forgets at times":  # exp underflows at every third token and is mild between
        log_g = np.where((np.arange(T) % 3 == 0)[:, None], -500.0, log_g)
    return Inputs(q, k, v, log_g, beta, rng.normal(size=(B, Hv, Dv, Dk)))


def loop(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Token by token: outputs [B, T, Hv, Dv] and the states [T + 1, B, Hv, Dv, Dk] around each."""
    group = inputs.v.shape[2] // inputs.k.shape[2]
    state = inputs.state
    states, outputs = [state], []
    for t in range(inputs.q.shape[1]):
        q, k = (np.repeat(x[:, t], group, axis=1) for x in (inputs.q, inputs.k))
        state = np.exp(inputs.log_g[:, t])[..., None, None] * state
        miss = inputs.v[:, t] - np.einsum("bhvk,bhk->bhv", state, k)
        state = state + np.einsum("bhv,bhk->bhvk", inputs.beta[:, t][..., None] * miss, k)
        states.append(state)
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q))
    return np.stack(outputs, axis=1), np.stack(states)


def error(actual: mx.array, expected: np.ndarray) -> float:
    """Largest difference against the size of what was expected."""
    values = np.array(actual).astype(np.float64)
    assert np.isfinite(values).all()
    return float(np.abs(values - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("dtype", [mx.float64, mx.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_equals_the_loop_over_its_tokens(kind: str, T: int, dtype: mx.Dtype) -> None:
    inputs = make(kind, T, np.random.default_rng(T))
    outputs, states = loop(inputs)
    arrays = inputs.arrays(dtype)
    y, journal = run_block(*arrays)
    assert y.dtype == dtype
    assert error(y, outputs) < TOLERANCE[dtype]
    for n in {0, 1, T // 2, T - 1, T}:
        after = state_after(journal, arrays[-1], mx.full((2,), n, dtype=mx.int32))
        assert error(after, states[n]) < TOLERANCE[dtype], n


@pytest.mark.parametrize(("Hk", "Hv"), [(1, 1), (1, 4), (2, 2), (3, 6)])
def test_value_heads_share_key_heads_in_groups(Hk: int, Hv: int) -> None:
    inputs = make("random", 8, np.random.default_rng(1), 3, Hk, Hv)
    outputs, states = loop(inputs)
    arrays = inputs.arrays(mx.float64)
    y, journal = run_block(*arrays)
    assert error(y, outputs) < 1e-9
    assert error(state_after(journal, arrays[-1], mx.full((3,), 8, dtype=mx.int32)), states[8]) < 1e-9


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_row_is_committed_at_its_own_count(data: st.DataObject) -> None:
    T = data.draw(st.sampled_from((1, 2, 4, 8, 16)), label="T")
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    counts = np.array(data.draw(st.lists(st.integers(0, T), min_size=5, max_size=5), label="counts"))
    inputs = make(kind, T, np.random.default_rng(data.draw(st.integers(0, 9), label="seed")), B=5)
    arrays = inputs.arrays(mx.float64)
    _, journal = run_block(*arrays)
    after = np.array(state_after(journal, arrays[-1], mx.array(counts, dtype=mx.int32)))
    _, states = loop(inputs)
    for b, n in enumerate(counts):
        assert np.abs(after[b] - states[n, b]).max() < 1e-9
        if n == 0:
            assert (after[b] == inputs.state[b]).all()


def test_a_count_off_by_one_is_seen() -> None:
    """The control of the tests above: a wrong commit is far outside their tolerance."""
    inputs = make("random", 8, np.random.default_rng(0))
    arrays = inputs.arrays(mx.float64)
    _, journal = run_block(*arrays)
    _, states = loop(inputs)
    assert error(state_after(journal, arrays[-1], mx.array([5, 4], dtype=mx.int32)), states[4]) > 1e-2


def test_layers_stacked_in_front_commit_as_single_layers_do() -> None:
    rng = np.random.default_rng(3)
    layers = [make("random", 8, rng).arrays(mx.float64) for _ in range(3)]
    journals = [run_block(*layer)[1] for layer in layers]
    stacked = Journal(*(mx.stack([getattr(j, name) for j in journals]) for name in ("delta", "k", "decay")))
    counts = mx.array([3, 7], dtype=mx.int32)
    together = state_after(stacked, mx.stack([layer[-1] for layer in layers]), counts)
    for i, layer in enumerate(layers):
        assert error(together[i], np.array(state_after(journals[i], layer[-1], counts))) < 1e-12


@pytest.mark.parametrize("dtype", [mx.float64, mx.float32], ids=["float64", "float32"])
def test_rejected_tokens_do_not_change_a_bit_of_what_is_kept(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(5)
    inputs, counts = make("random", 16, rng, B=4), np.array([0, 3, 9, 15])
    results = []
    for variant in (inputs, inputs.with_garbage(counts, rng)):
        arrays = variant.arrays(dtype)
        y, journal = run_block(*arrays)
        results.append((np.array(y), np.array(state_after(journal, arrays[-1], mx.array(counts)))))
    (y, after), (other_y, other_after) = results
    assert (after == other_after).all()
    for b, n in enumerate(counts):
        assert (y[b, :n] == other_y[b, :n]).all()
        assert (y[b, n:] != other_y[b, n:]).any()


def test_a_journal_that_is_not_finite_where_it_is_rejected_leaves_the_state_finite() -> None:
    inputs, counts = make("random", 8, np.random.default_rng(6), B=3), np.array([0, 4, 7])
    arrays = inputs.arrays(mx.float64)
    _, journal = run_block(*arrays)
    rejected = mx.arange(8) >= mx.array(counts)[:, None]  # [B, T]
    nan = mx.array(mx.nan, dtype=mx.float64)
    spoilt = Journal(
        delta=mx.where(rejected[:, None, :, None], nan, journal.delta),
        k=mx.where(rejected[:, None, :, None], nan, journal.k),
        decay=mx.where(rejected[:, None], nan, journal.decay),
    )
    clean = state_after(journal, arrays[-1], mx.array(counts))
    assert (np.array(state_after(spoilt, arrays[-1], mx.array(counts))) == np.array(clean)).all()


@pytest.mark.parametrize("kind", ["random", "repeated word", "forgets at times"])
def test_chunks_of_ragged_prompts_equal_the_loop(kind: str) -> None:
    T, counts = 200, np.array([0, 1, 63, 64, 65, 128, 150, 200])
    inputs = make(kind, T, np.random.default_rng(8), B=len(counts))
    outputs, states = loop(inputs)
    q, k, v, log_g, beta, state = inputs.arrays(mx.float64)
    y, after = run_chunks(q, k, v, log_g, beta, state, mx.array(counts))
    assert T > 3 * MAX_BLOCK
    for b, n in enumerate(counts):
        assert error(after[b], states[n, b]) < 1e-9
        if n:
            assert error(y[b, :n], outputs[b, :n]) < 1e-9


@pytest.mark.parametrize("kind", ["random", "repeated word", "forgets at times"])
def test_mlxs_own_operation_says_the_same_of_ragged_prompts(kind: str) -> None:
    """Metal's way through a prompt; elsewhere the same operation is a loop of MLX's, which this runs."""
    T, counts = 48, np.array([0, 1, 31, 48])
    inputs = make(kind, T, np.random.default_rng(9), B=len(counts), Dk=32, Dv=32)
    outputs, states = loop(inputs)
    q, k, v, log_g, beta, state = inputs.arrays(mx.float32)
    y, after = run_kernel(q, k, v, log_g, beta, state, mx.array(counts))
    for b, n in enumerate(counts):
        assert error(after[b], states[n, b]) < 1e-4
        if n:
            assert error(y[b, :n], outputs[b, :n]) < 1e-4


@pytest.mark.parametrize(
    ("is_metal", "device", "Dk", "slow", "chosen"),
    [
        (True, "gpu", 32, "run_chunks", "run_kernel"),
        (True, "gpu", 32, "run_kernel", "run_chunks"),
        (True, "gpu", 16, "run_chunks", "run_chunks"),  # the kernel cannot
        (True, "cpu", 32, "run_chunks", "run_chunks"),
        (False, "gpu", 32, "run_chunks", "run_chunks"),
    ],
)
def test_a_prompt_goes_by_the_faster_way_on_metal_and_by_the_closed_form_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_metal: bool, device: str, Dk: int, slow: str, chosen: str
) -> None:
    clock = [0.0]
    ways = {name: lambda *_, name=name: _pass(clock, name == slow) for name in ("run_kernel", "run_chunks")}
    for name, way in ways.items():
        monkeypatch.setattr(gated_delta, name, way)
    monkeypatch.setattr(gated_delta.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_metal)
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    prompt_way.cache_clear()
    try:
        assert prompt_way(2, 4, Dk, 32) is ways[chosen]
    finally:
        prompt_way.cache_clear()


def _pass(clock: list[float], is_slow: bool) -> tuple[mx.array, mx.array]:
    clock[0] += 2.0 if is_slow else 1.0
    return mx.zeros(1), mx.zeros(1)


@pytest.mark.parametrize("T", [1, 2, 3, 5, 13, 16, 33, 64])
@pytest.mark.parametrize("kind", ["random", "repeated key"])
def test_the_inverse_is_numpys(kind: str, T: int) -> None:
    strict = np.tril(make_lower(kind, T), -1)
    expected = np.linalg.inv(np.eye(T) + strict)
    for dtype, tolerance in ((mx.float64, 1e-9), (mx.float32, 1e-5)):
        actual = np.array(inverse_unit_lower(mx.array(strict, dtype=dtype)))
        assert np.abs(actual - expected).max() < tolerance


def test_powers_of_repeated_keys_would_not_pass() -> None:
    """The control: the cheaper inverse, (I - L)(I + L^2)(I + L^4)..., loses everything at 64."""
    strict = mx.array(np.tril(make_lower("repeated key", 64), -1), dtype=mx.float32)
    expected = np.linalg.inv(np.eye(64) + np.array(strict).astype(np.float64))
    inverse, power = mx.eye(64) - strict, strict @ strict
    for _ in range(5):
        inverse, power = inverse @ (mx.eye(64) + power), power @ power
    assert not np.abs(np.array(inverse) - expected).max() < 1e-5


def make_lower(kind: str, T: int) -> np.ndarray:
    """What the delta rule inverts: products of unit keys, times beta."""
    inputs = make(kind, T, np.random.default_rng(T), B=1, Hk=1, Hv=1)
    k = inputs.k[0, :, 0]
    return 0.99 * (k @ k.T)


@pytest.mark.parametrize("dtype", [mx.float64, mx.float32], ids=["float64", "float32"])
def test_the_log_decay_does_not_underflow(dtype: mx.Dtype) -> None:
    a = np.array([-50.0, -5.0, 0.0, 5.0, 80.0, 1e4])
    a_log, bias = np.array([-3.0] * 3 + [0.5] * 2 + [2.7]), np.array([-1.0] * 5 + [3.0])
    actual = log_decay(*(mx.array(x, dtype=dtype) for x in (a, -np.exp(a_log), bias)))
    expected = -np.exp(a_log) * np.logaddexp(0.0, a + bias)
    limit = 1e-12 if dtype == mx.float64 else 1e-5
    assert (np.abs(np.array(actual) - expected) <= limit * np.abs(expected) + 1e-15).all()
    assert (np.array(actual) < 0).all()


def test_the_log_decay_of_half_precision_inputs_is_computed_wide() -> None:
    a, bias = (mx.array([[[x]]], dtype=mx.bfloat16) for x in (0.1, 0.2))
    result = log_decay(a, mx.array([-np.exp(0.3)], dtype=mx.float32), bias)
    assert result.dtype == mx.float32
    wide = np.array(a.astype(mx.float32)) + np.array(bias.astype(mx.float32))
    assert np.abs(np.array(result) + np.exp(0.3) * np.log1p(np.exp(wide))).max() < 1e-6
