"""The law of a chosen token: softmax over what truncation leaves, keyed by seed and position."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_core.request import Sampling
from dflash_core.sampling import choose, gumbel, keep_mask, pack, seed_key
from tests.core.engine_fixtures import eager

LOGITS = np.array([2.0, 1.2, 0.3, 1.9, -0.5, 0.9, 0.0, -1.5])
SEEDS, PLACES = 24, 500  # 12,000 draws
# Quantiles of chi-square at 1 - 1e-4, by degrees of freedom.
CRITICAL = {2: 18.421, 3: 21.108, 4: 23.513, 7: 29.878, 63: 113.5}

Choose = Callable[[Sampling], np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def draw(settings: dict[str, Any], places: np.ndarray | None = None) -> np.ndarray:
    """Tokens [SEEDS, PLACES] at successive positions, from the same logits everywhere."""
    rows = [Sampling(**settings, seed=seed) for seed in range(SEEDS)]
    logits = mx.broadcast_to(mx.array(LOGITS, dtype=mx.float32), (SEEDS, PLACES, len(LOGITS)))
    positions = np.arange(PLACES) if places is None else places
    places_array = mx.broadcast_to(mx.array(positions.astype(np.int32)), (SEEDS, PLACES))
    return np.array(choose(logits, places_array, pack(rows, len(LOGITS))))


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """The statistic, and what it exceeds once in 10,000 times; infinite if the impossible occurred."""
    expected = law * counts.sum()
    possible = law > 0
    if counts[~possible].any():
        return float("inf"), CRITICAL[int(possible.sum()) - 1]
    gaps = (counts - expected)[possible] ** 2 / expected[possible]
    return float(gaps.sum()), CRITICAL[int(possible.sum()) - 1]


def follows(tokens: np.ndarray, law: np.ndarray) -> bool:
    statistic, critical = chi_square(np.bincount(tokens.ravel(), minlength=len(law)), law)
    return statistic < critical


def law_of(temperature: float, kept: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    masked = np.full(len(LOGITS), -np.inf)
    masked[list(kept)] = LOGITS[list(kept)] / temperature
    return softmax(masked)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_at_their_temperature(temperature: float) -> None:
    assert follows(draw({"temperature": temperature}), law_of(temperature))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 3}, (0, 1, 3)),
        ({"top_p": 0.7}, (0, 1, 3)),
        ({"min_p": 0.3}, (0, 1, 3, 5)),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.2}, (0, 1, 3, 5)),
    ],
    ids=["top-k", "top-p", "min-p", "all three"],
)
def test_tokens_follow_the_softmax_of_what_truncation_leaves(
    cut: dict[str, Any], kept: tuple[int, ...]
) -> None:
    assert follows(draw({"temperature": 1.0, **cut}), law_of(1.0, kept))


def test_successive_tokens_are_independent() -> None:
    tokens = draw({"temperature": 1.0})
    pairs = tokens[:, 0::2] * 8 + tokens[:, 1::2]
    law = np.outer(law_of(1.0), law_of(1.0)).ravel()
    assert follows(pairs, law)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: draw({"temperature": 1.0}),  # the temperature is forgotten
        lambda: draw({"temperature": 0.8}, np.zeros(PLACES)),  # noise is used again at every position
        lambda: draw({"temperature": 0.8}, np.arange(PLACES) // 50),  # and only in blocks
        lambda: draw({"temperature": 0.8, "top_k": 7}),  # the rarest token is lost
        lambda: draw({"temperature": 0.0}),  # greedy
    ],
    ids=["no temperature", "one noise", "noise per block", "truncated", "greedy"],
)
def test_wrong_rules_are_rejected_by_the_same_test(wrong: Callable[[], np.ndarray]) -> None:
    assert follows(draw({"temperature": 0.8}), law_of(0.8))
    assert not follows(wrong(), law_of(0.8))


def test_dependent_tokens_are_rejected_by_the_same_test() -> None:
    tokens = draw({"temperature": 1.0}, np.arange(PLACES) // 2)
    pairs = tokens[:, 0::2] * 8 + tokens[:, 1::2]
    assert not follows(pairs, np.outer(law_of(1.0), law_of(1.0)).ravel())


# Gumbel noise


def noise(seeds: list[int], positions: list[list[int]], vocab: int = 64) -> np.ndarray:
    keys = pack([Sampling(temperature=1.0, seed=seed) for seed in seeds], vocab).keys
    return np.array(gumbel(keys, mx.array(positions, dtype=mx.int32), vocab))


def test_noise_depends_on_seed_and_absolute_position_alone() -> None:
    together = noise([3, 4, 5], [[10, 11, 12, 13], [11, 12, 13, 14], [0, 1, 2, 3]])
    for row, (seed, first) in enumerate([(3, 10), (4, 11), (5, 0)]):
        for place in range(4):
            assert (noise([seed], [[first + place]])[0, 0] == together[row, place]).all()
    assert (noise([5, 3], [[3, 2], [13, 12]])[1] == together[0, [3, 2]]).all()


def test_noise_differs_between_neighbouring_seeds_and_positions() -> None:
    values = noise(list(range(30)), [list(range(20))] * 30).reshape(600, 64)
    assert len({v.tobytes() for v in values}) == 600
    correlation = np.corrcoef(values) - np.eye(600)
    assert np.abs(correlation).max() < 0.7


def test_noise_is_gumbels_and_finite() -> None:
    values = noise(list(range(50)), [list(range(100))] * 50, 100).ravel()
    assert np.isfinite(values).all()
    assert abs(values.mean() - 0.5772) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.02
    top = np.sort(values)[-2000:]
    assert len(np.unique(top)) > 1990  # fine where it is large
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert abs(np.quantile(values, quantile) + np.log(-np.log(quantile))) < 0.1


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1])
def test_any_64_bit_seed_has_a_key_of_its_own(seed: int) -> None:
    assert seed_key(seed) == seed_key(seed & (2**64 - 1))
    assert seed_key(seed) != seed_key(seed + 1)


# Greedy, ties, truncation by the plain rule


def test_greedy_is_the_arg_max_in_every_window() -> None:
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(4, 6, 50)), dtype=mx.float32)
    positions = mx.broadcast_to(mx.arange(6), (4, 6))
    expected = np.array(logits).argmax(-1)
    assert (np.array(choose(logits, positions, pack([None] * 4, 50))) == expected).all()
    company = ([Sampling(temperature=1.0)], [Sampling(temperature=1.0, top_k=3, top_p=0.5)])
    for other in company:
        mixed = pack([None, Sampling(), Sampling(seed=9, top_k=1), *other], 50)
        chosen = np.array(choose(logits, positions, mixed))
        assert (chosen[:3] == expected[:3]).all()
        assert (chosen[3] != expected[3]).any()


@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=["top-k", "top-p", "min-p"]
)
def test_the_hardest_truncation_is_greedy_at_any_temperature(cut: dict[str, Any]) -> None:
    assert (draw({"temperature": 5.0, **cut}) == LOGITS.argmax()).all()


def test_settings_without_effect_change_no_token() -> None:
    plain = draw({"temperature": 0.9})
    for off in ({"top_k": 8}, {"top_k": 100}, {"top_p": 1.0, "min_p": 1e-9}):
        assert (draw({"temperature": 0.9, **off}) == plain).all()


def test_a_rows_tokens_do_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(1)
    logits = mx.array(3 * rng.normal(size=(5, 8, 60)), dtype=mx.float32)
    positions = mx.arange(8) + 100 * mx.arange(5)[:, None]
    rows = [
        Sampling(),
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=1.0, top_k=9, seed=2),
        Sampling(temperature=1.3, top_p=0.8, seed=3),
        Sampling(temperature=0.4, min_p=0.1, seed=4),
    ]
    together = np.array(choose(logits, positions, pack(rows, 60)))
    for i, row in enumerate(rows):
        one = choose(logits[i : i + 1], positions[i : i + 1], pack([row], 60))
        assert (np.array(one)[0] == together[i]).all()


def plain_keep(logits: np.ndarray, row: Sampling) -> tuple[np.ndarray, float]:
    """One row's surviving tokens: top-k, then top-p, then min-p, ties with the last all kept.

    Second: how near any probability came to a threshold.
    """
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if row.top_k > 0:
        order = order[: row.top_k]
    law = softmax(np.array([logits[i] for i in order]) / row.temperature)
    kept, before, near = [], 0.0, 1.0
    for i, p in zip(order, law, strict=True):
        if kept:
            near = min(near, abs(before - row.top_p), abs(p / law[0] - row.min_p))
        if kept and (before >= row.top_p or p < row.min_p * law[0]):
            break
        kept.append(i)
        before += p
    return logits >= logits[kept[-1]], near


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(-12, 12), min_size=12, max_size=12),
    temperature=st.sampled_from((0.3, 1.0, 2.5)),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from((1.0, 0.95, 0.7, 0.31, 0.05)),
    min_p=st.sampled_from((0.0, 0.02, 0.33, 0.9)),
)
def test_truncation_is_the_plain_rules(
    steps: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Quarter steps make ties common."""
    logits = np.array(steps) / 4
    row = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, near = plain_keep(logits, row)
    assume(near > 1e-5)
    arrays = pack([Sampling(temperature=1.0, top_k=2), row], 12)
    batch = mx.array(np.stack([logits[::-1], logits]), dtype=mx.float32)[:, None]
    assert np.array(keep_mask(batch, arrays))[1, 0].tolist() == expected.tolist()


def test_the_order_of_truncations_matters_and_is_top_k_first() -> None:
    """After top-k of 2, the first token alone holds 0.6 of the mass; of all eight it holds a quarter."""
    law = np.array([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    row = Sampling(temperature=1.0, top_k=2, top_p=0.55)
    kept = np.array(keep_mask(mx.array(np.log(law), dtype=mx.float32)[None, None], pack([row], 8)))[0, 0]
    assert kept.tolist() == [True] + [False] * 7
