"""The engine's own forward against mlx-lm's: the same logits, caches and residual streams."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from dflash_core.checkpoints import LoadedTarget, load_target
from dflash_core.loading import target_cache_shape
from dflash_core.models.target import CacheArrays, TargetNetwork
from dflash_core.row_cache import RowCaches
from dflash_core.sampling import pack
from dflash_core.target import Target
from tests.core.engine_fixtures import TINY, RowState, difference, eager, prompt, state_alone, tiny_lane
from tests.core.tiny_checkpoints import write_target

TAPS = (0, 1, 2)
REPEATED_WORD = (7,) * 150
# mlx-lm's own exp is exact to float32 only, in float64 too.
KINDS: dict[str, tuple[dict[str, Any], mx.Dtype, float]] = {
    "float64": ({}, mx.float64, 1e-4),
    "float32": ({}, mx.float32, 1e-4),
    "float32, separate head": ({"tied": False}, mx.float32, 1e-4),
    "4-bit": ({"quantize": 4}, mx.float32, 1e-4),
}


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@cache
def load(kind: str) -> tuple[LoadedTarget, TargetNetwork]:
    options, dtype, _ = KINDS.get(kind, ({}, mx.bfloat16, 0.0))
    with TemporaryDirectory() as folder:
        path = write_target(Path(folder), **{**TINY, "dtype": mx.float32, **options})
        loaded = load_target(path, dtype=dtype)
    return loaded, TargetNetwork(loaded.model.language_model, TAPS)


def make_caches(loaded: LoadedTarget, num_slots: int = 1, capacity: int = 192) -> RowCaches:
    return RowCaches(target_cache_shape(loaded.spec, loaded.dtype), num_slots, capacity)


def lengths(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def verify_logits(network: TargetNetwork, loaded: LoadedTarget, tokens: Sequence[int]) -> mx.array:
    hidden, *_ = network.verify(mx.array([tokens]), lengths(0), make_caches(loaded).arrays)
    return network.logits(hidden)


def streams(loaded: LoadedTarget, tokens: Sequence[int]) -> tuple[list[mx.array], list[Any]]:
    """mlx-lm's layers run by hand: the residual stream after each, and its caches."""
    model = loaded.model.language_model
    caches = model.make_cache()
    h = model.model.embed_tokens(mx.array([tokens]))
    full = create_attention_mask(h, caches[model.model.fa_idx])
    linear = create_ssm_mask(h, caches[model.model.ssm_idx])
    outputs: list[mx.array] = []
    for layer, layer_cache in zip(model.model.layers, caches, strict=True):
        h = layer(h, mask=linear if layer.is_linear else full, cache=layer_cache)
        outputs.append(h)
    return outputs, caches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 64])
def test_a_block_has_mlx_lms_logits_at_every_place(kind: str, length: int) -> None:
    loaded, network = load(kind)
    tokens = prompt(length, length)
    expected = loaded.model(mx.array([tokens]))
    assert difference(verify_logits(network, loaded, tokens), expected) < KINDS[kind][2]


def test_another_token_in_the_middle_would_be_seen() -> None:
    """The control of the comparisons above."""
    loaded, network = load("float32")
    tokens = list(prompt(16, 16))
    expected = loaded.model(mx.array([tokens]))
    tokens[8] += 1
    gap = np.abs(np.array(verify_logits(network, loaded, tokens)) - np.array(expected))[0].max(-1)
    assert gap[:8].max() < 1e-4
    assert gap[8:].min() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens",
    [prompt(3, 1), prompt(4, 65), prompt(5, 150), REPEATED_WORD],
    ids=["one", "65", "150", "repeated word"],
)
def test_a_prompt_has_mlx_lms_logits_and_caches(kind: str, tokens: tuple[int, ...]) -> None:
    loaded, network = load(kind)
    # One word over and over magnifies every rounding of this random model, mlx-lm's own as well: its float32
    # logits are up to 1e-3 from float64 there. What powers of L would lose is 5.
    limit = KINDS[kind][2] * (100 if tokens == REPEATED_WORD else 1)
    expected_streams, expected = streams(loaded, tokens)
    caches, count = make_caches(loaded), lengths(len(tokens))
    hidden, features, arrays = network.prefill(mx.array([tokens]), lengths(0), count, caches.arrays)
    assert difference(network.logits(hidden), loaded.model(mx.array([tokens]))[:, -1]) < limit
    assert difference(features, mx.concatenate([expected_streams[i] for i in TAPS], axis=-1)) < limit
    attention = [c for c in expected if hasattr(c, "keys")]
    recurrent = [c for c in expected if not hasattr(c, "keys")]
    n = len(tokens)
    for i, theirs in enumerate(attention):
        assert difference(arrays.keys[i][:, :, :n], theirs.keys[:, :, :n]) < limit
        assert difference(arrays.values[i][:, :, :n], theirs.values[:, :, :n]) < limit
    for i, theirs in enumerate(recurrent):
        assert difference(arrays.conv[i], theirs[0]) < limit
        assert difference(arrays.states[i], theirs[1]) < limit


def test_features_are_the_stream_after_the_tapped_layer_before_the_final_norm() -> None:
    loaded, network = load("float64")
    tokens = prompt(6, 12)
    after = [np.array(h) for h in streams(loaded, tokens)[0]]
    _, features, *_ = network.verify(mx.array([tokens]), lengths(0), make_caches(loaded).arrays)
    parts = np.split(np.array(features), len(TAPS), axis=-1)
    for tap, part in zip(TAPS, parts, strict=True):
        gaps = [difference(part, h) for h in after]
        assert gaps[tap] < 1e-4
        assert min(gap for layer, gap in enumerate(gaps) if layer != tap) > 1e-2


def test_a_target_without_taps_plays_with_features_that_nobody_reads() -> None:
    loaded, _ = load("float32")
    target = Target(
        TargetNetwork(loaded.model.language_model, ()),
        cache_shape=target_cache_shape(loaded.spec, loaded.dtype),
        vocab_size=loaded.spec.vocab_size,
        max_context=loaded.spec.max_context,
    )
    verdict = target.prefill(
        target.new_caches(1, 1),
        np.array([[1, 2]], dtype=np.int32),
        np.array([2], dtype=np.int32),
        pack([None], target.vocab_size),
    )
    assert verdict.features.shape == (1, 2, target.feature_size)
    assert np.isfinite(np.array(verdict.features)).all()
    assert verdict.read().chosen.tolist() == [[int(mx.argmax(loaded.model(mx.array([[1, 2]]))[0, -1]))]]


def prefill_together(target: Target, prompts: Sequence[tuple[int, ...]], chunk: int) -> tuple[RowCaches, Any]:
    """Rows of any length read in chunks of one width; features per row."""
    caches = target.new_caches(len(prompts), 1)
    sampling = pack([None] * len(prompts), target.vocab_size)
    features: list[list[np.ndarray]] = [[] for _ in prompts]
    while any(caches.lengths[b] < len(p) for b, p in enumerate(prompts)):
        tokens = np.full((len(prompts), chunk), 5, dtype=np.int32)
        counts = np.zeros(len(prompts), dtype=np.int32)
        for b, p in enumerate(prompts):
            part = p[caches.lengths[b] :][:chunk]
            tokens[b, : len(part)], counts[b] = part, len(part)
        verdict = target.prefill(caches, tokens, counts, sampling)
        for b, n in enumerate(counts):
            features[b].append(np.array(verdict.features[b, :n]))
    return caches, [np.concatenate(parts) for parts in features]


@pytest.mark.parametrize("chunk", [16, 64, 160])
def test_prompts_of_mixed_lengths_read_together_equal_prompts_read_alone(chunk: int) -> None:
    target = tiny_lane().target
    prompts = [prompt(20 + n, n) for n in (1, 2, 15, 16, 17, 63, 100, 150)]
    caches, features = prefill_together(target, prompts, chunk)
    for b, tokens in enumerate(prompts):
        assert RowState(caches, b).difference(state_alone(target, tokens)) < 1e-9
        _, (expected,) = prefill_together(target, [tokens], len(tokens))
        assert difference(features[b], expected) < 1e-9


def test_the_token_after_a_prompt_is_the_arg_max_of_its_last_place() -> None:
    loaded, network = load("float32")
    target = Target(
        network,
        cache_shape=target_cache_shape(loaded.spec, loaded.dtype),
        vocab_size=loaded.spec.vocab_size,
        max_context=loaded.spec.max_context,
    )
    prompts = [prompt(n, n) for n in (3, 9, 30)]
    tokens = np.zeros((3, 32), dtype=np.int32)
    for b, p in enumerate(prompts):
        tokens[b, : len(p)] = p
    counts = np.array([3, 9, 30], dtype=np.int32)
    verdict = target.prefill(target.new_caches(3, 1), tokens, counts, pack([None] * 3, target.vocab_size))
    outcome = verdict.read()
    expected = [int(mx.argmax(loaded.model(mx.array([p]))[0, -1])) for p in prompts]
    assert outcome.chosen[:, 0].tolist() == expected
    assert outcome.is_finite.all()


def test_a_bfloat16_model_stays_in_bfloat16_and_near_mlx_lm() -> None:
    loaded, network = load("bfloat16")
    tokens = prompt(9, 16)
    caches = make_caches(loaded).arrays
    hidden, features, written, journal = network.verify(mx.array([tokens]), lengths(0), caches)
    committed = network.commit(journal, written, lengths(16))
    wide: CacheArrays = committed
    halves = [hidden, features, *wide.keys, *wide.values, wide.conv, network.logits(hidden)]
    assert {x.dtype for x in halves} == {mx.bfloat16}
    assert wide.states.dtype == mx.float32
    mine = np.array(network.logits(hidden).astype(mx.float32))
    theirs = np.array(loaded.model(mx.array([tokens])).astype(mx.float32))
    exact_loaded, _ = load("float32")
    exact = np.array(exact_loaded.model(mx.array([tokens])))
    # As far from the truth as mlx-lm's own bfloat16 is, not farther.
    assert np.abs(mine - exact).mean() < 1.5 * np.abs(theirs - exact).mean() + 1e-3
