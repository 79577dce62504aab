"""A row's tokens are a function of its request alone, whatever is drafted beside it, joins or restarts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.processors import SampledRow
from dflash_core.request import RowRequest, Sampling
from dflash_core.sampling import gumbel, keep_mask, pack
from tests.core.engine_fixtures import (
    VOCAB,
    ListedWidths,
    alone,
    eager,
    finish,
    opened,
    play,
    prompt,
    row,
    scripted,
    tiny_lane,
    tokens_of,
)

GREEDY = row("greedy", prompt(1, 9), 14)
SAMPLED = row("sampled", prompt(2, 4), 14, temperature=0.9, seed=11)
TRUNCATED = row("truncated", prompt(3, 21), 14, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=12)
HOT = row("hot", prompt(4, 13), 14, temperature=3.0, seed=13)
MIXED = (GREEDY, SAMPLED, TRUNCATED, HOT)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def expected(requests: Sequence[RowRequest]) -> dict[str, tuple[int, ...]]:
    return {request.row_id: alone(tiny_lane(), request) for request in requests}


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """The target's logits after a text read in one piece, without any cache kept."""
    target = tiny_lane().target
    caches = target.new_caches(1, 128).arrays
    zero, count = mx.array([0], dtype=mx.int32), mx.array([len(tokens)], dtype=mx.int32)
    hidden, *_ = target.network.prefill(mx.array([tokens], dtype=mx.int32), zero, count, caches)
    return np.array(target.network.logits(hidden))[0].astype(np.float64)


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED, HOT], ids=lambda r: r.row_id)
def test_tokens_are_the_arg_max_of_logits_and_noise(request_: RowRequest) -> None:
    """Token by token from whole texts: logits + T g, with g keyed by seed and absolute position."""
    tokens, settings = list(request_.tokens), request_.sampling
    for _ in range(8):
        position = mx.array([[len(tokens)]], dtype=mx.int32)
        noise = np.array(gumbel(pack([settings], VOCAB).keys, position, VOCAB))[0, 0]
        tokens.append(int((logits_after(tokens) + settings.temperature * noise).argmax()))
    assert tuple(tokens[len(request_.tokens) :]) == alone(tiny_lane(), request_)[:8]


@pytest.mark.parametrize("width", [1, 2, 8, 16])
@pytest.mark.parametrize("request_", MIXED, ids=lambda r: r.row_id)
def test_speculation_changes_no_token(request_: RowRequest, width: int) -> None:
    lane = tiny_lane()
    drafter = scripted(lane, [request_], lambda _row, length: length % 7)
    assert play(lane, request_, width=width, drafter=drafter) == expected([request_])


def test_a_real_drafters_wrong_drafts_change_no_token() -> None:
    for request in MIXED:
        assert play(tiny_lane(), request, width=8) == expected([request])


@pytest.mark.parametrize("accept", ["per_row", "clamp"])
@pytest.mark.parametrize("widths", [(1,), (16,), (8, 1, 4)], ids=str)
def test_company_changes_no_token(widths: tuple[int, ...], accept: str) -> None:
    drafter = scripted(tiny_lane(), MIXED, lambda row_id, length: (length + len(row_id)) % 6)
    together = play(tiny_lane(), *MIXED, width=ListedWidths(widths), drafter=drafter, accept=accept)
    assert together == expected(MIXED)


def test_a_join_changes_no_token() -> None:
    """The last one joins an idle slot of a window of four, in which nothing else changes."""
    drafter = scripted(tiny_lane(), MIXED, 0)
    with opened(tiny_lane(), GREEDY, drafter=drafter) as window:
        reports = []
        for request in (SAMPLED, TRUNCATED, HOT):
            reports += [window.step(), window.step()]
            window.admit(request)
        reports.append(window.step())
        assert window.num_live == 4
        reports += finish(window)
    assert tokens_of(reports) == expected(MIXED)


@pytest.mark.parametrize("max_rows", [1, 2])
def test_a_refill_changes_no_token(max_rows: int) -> None:
    drafter = scripted(tiny_lane(), MIXED, lambda _row, length: length % 5)
    assert play(tiny_lane(), *MIXED, max_rows=max_rows, drafter=drafter) == expected(MIXED)


@pytest.mark.parametrize("request_", MIXED, ids=lambda r: r.row_id)
@pytest.mark.parametrize("committed", [1, 7, 13])
def test_a_restart_goes_on_with_the_same_tokens(request_: RowRequest, committed: int) -> None:
    said = alone(tiny_lane(), request_)
    again = replace(
        request_,
        tokens=request_.tokens + said[:committed],
        max_tokens=request_.max_tokens - committed,
        prompt_length=len(request_.tokens),
    )
    company = [other for other in (GREEDY, HOT) if other.row_id != request_.row_id]
    assert play(tiny_lane(), again, *company)[request_.row_id] == said[committed:]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    same = replace(SAMPLED, row_id=GREEDY.row_id)
    other = replace(SAMPLED, row_id=HOT.row_id, sampling=replace(SAMPLED.sampling, seed=99))
    played = play(tiny_lane(), SAMPLED, same, other)
    assert played[same.row_id] == played[SAMPLED.row_id]
    assert played[other.row_id] != played[SAMPLED.row_id]
    assert played[SAMPLED.row_id] != alone(tiny_lane(), replace(SAMPLED, sampling=Sampling()))


def test_a_greedy_row_ignores_its_seed() -> None:
    seeded = replace(GREEDY, sampling=Sampling(seed=5, top_k=3, top_p=0.1))
    assert alone(tiny_lane(), seeded) == alone(tiny_lane(), GREEDY)


def test_noise_out_of_place_would_be_seen() -> None:
    """The control: one token more in front, and every later key is another."""
    shifted = replace(SAMPLED, tokens=(5, *SAMPLED.tokens))
    assert alone(tiny_lane(), shifted) != alone(tiny_lane(), SAMPLED)


def test_a_row_that_truncates_nothing_keeps_every_token_in_any_company() -> None:
    """A float32 sum of a large vocabulary's probabilities reaches 1 before its tail does."""
    logits = mx.array(2.5 * np.random.default_rng(1).normal(size=(2, 1, 150_000)), dtype=mx.float32)
    rows = [SampledRow(Sampling(temperature=1.0)), SampledRow(Sampling(temperature=1.0, top_k=5))]
    kept = np.array(keep_mask(logits, pack(rows, 150_000)))
    assert kept[0].all()
    assert kept[1].sum() == 5
