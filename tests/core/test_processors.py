"""Biases, penalties and least lengths: the same tokens as one row that speaks one token at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.errors import InvalidRequest
from dflash_core.processors import Penalties, SampledRow
from dflash_core.request import RowRequest, Sampling
from dflash_core.sampling import choose, pack
from tests.core.engine_fixtures import (
    ListedWidths,
    ScriptedDrafter,
    eager,
    finish,
    opened,
    play,
    prompt,
    row,
    tiny_lane,
    tokens_of,
)
from tests.core.sampling_reference import speak

HOT = {"temperature": 1.5, "seed": 21}
BIAS = ((7, 3.0), (19, -100.0), (7, 1.0), (42, 5.5))

PLAIN = row("plain", prompt(1, 9), 16)
BIASED = row("biased", prompt(2, 12), 16, logit_bias=BIAS)
PRESENT = row("present", prompt(3, 5), 16, presence_penalty=1.5)
FREQUENT = row("frequent", prompt(4, 17), 16, frequency_penalty=0.8, logit_bias=((3, 4.0),))
REPEATED = row("repeated", prompt(5, 30), 16, repetition_penalty=1.6)
NEGATIVE = row("negative", prompt(6, 8), 16, frequency_penalty=-2.0, temperature=0.8, seed=21)
EVERYTHING = row(
    "everything",
    prompt(7, 21),
    16,
    logit_bias=BIAS,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.5,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    **HOT,
)
ALL = (PLAIN, BIASED, PRESENT, FREQUENT, REPEATED, NEGATIVE, EVERYTHING)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def expected(requests: Sequence[RowRequest]) -> dict[str, tuple[int, ...]]:
    return {request.row_id: speak(request).tokens for request in requests}


def knowing(requests: Sequence[RowRequest], num_right: int | Callable[[str, int], int]) -> ScriptedDrafter:
    """A drafter that knows what the reference says, and how often it is to be right."""
    scripts = {request.row_id: (*request.tokens, *speak(request).tokens) for request in requests}
    return ScriptedDrafter(tiny_lane().drafter, scripts, num_right)


def often(row_id: str, length: int) -> int:
    return (3 * length + len(row_id)) % 8


@pytest.mark.parametrize("width", [1, 2, 8, 16])
@pytest.mark.parametrize("request_", ALL, ids=lambda r: r.row_id)
def test_a_row_alone_says_what_the_reference_says(request_: RowRequest, width: int) -> None:
    assert play(tiny_lane(), request_, width=width, drafter=knowing([request_], often)) == expected(
        [request_]
    )


@pytest.mark.parametrize("widths", [(1,), (16,), (8, 1, 4)], ids=str)
def test_so_does_every_row_of_a_mixed_batch(widths: tuple[int, ...]) -> None:
    drafter = knowing(ALL, often)
    assert play(tiny_lane(), *ALL, width=ListedWidths(widths), drafter=drafter) == expected(ALL)


def test_so_does_it_with_a_real_drafter() -> None:
    assert play(tiny_lane(), *ALL, width=8) == expected(ALL)


def test_a_whole_block_of_right_drafts_is_kept() -> None:
    """The history inside a block is the drafted prefix: right drafts are right under penalties too."""
    with opened(tiny_lane(), EVERYTHING, width=8, drafter=knowing([EVERYTHING], 15)) as window:
        reports = finish(window)
    assert tokens_of(reports) == expected([EVERYTHING])
    assert [p.walked for r in reports for p in r.rows if p.drafted] == [7, 7]  # 1 + 8 + 7 of 16 tokens


def test_a_join_disturbs_no_history() -> None:
    drafter = knowing(ALL, often)
    with opened(tiny_lane(), ALL[0], ALL[3], width=4, drafter=drafter) as window:
        reports = []
        for request in (ALL[6], ALL[4], ALL[1]):
            reports += [window.step(), window.step()]
            window.admit(request)
        reports += finish(window)
    assert tokens_of(reports) == expected([ALL[i] for i in (0, 3, 6, 4, 1)])


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_a_refill_disturbs_no_history(max_rows: int) -> None:
    lengths = [replace(request, max_tokens=6 + 3 * i) for i, request in enumerate(ALL)]
    drafter = knowing(lengths, often)
    assert play(tiny_lane(), *lengths, max_rows=max_rows, drafter=drafter) == expected(lengths)


@pytest.mark.parametrize("committed", [1, 7, 13])
def test_a_row_that_moved_remembers_what_it_said(committed: int) -> None:
    moved = []
    for request in ALL:
        said = speak(request).tokens[:committed]
        rest = request.max_tokens - committed
        tokens = request.tokens + said
        moved.append(replace(request, tokens=tokens, max_tokens=rest, prompt_length=len(request.tokens)))
    played = play(tiny_lane(), *moved, width=4)
    assert played == {r.row_id: speak(r).tokens[committed:] for r in ALL}


@pytest.mark.parametrize(
    "wanted", [BIASED, PRESENT, FREQUENT, REPEATED, NEGATIVE, EVERYTHING], ids=lambda r: r.row_id
)
def test_every_setting_has_an_effect_here(wanted: RowRequest) -> None:
    """The control: without its processors each of these rows says something else."""
    kept = {
        name: getattr(wanted.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")
    }
    bare = replace(wanted, sampling=Sampling(**kept))
    assert speak(bare).tokens != speak(wanted).tokens


# Least length


def stopping(name: str, request: RowRequest, min_tokens: int) -> RowRequest:
    """``request``, but the third token of its answer would stop it."""
    third = speak(request).tokens[2]
    settings = replace(request.sampling, min_tokens=min_tokens)
    return replace(request, row_id=name, sampling=settings, stop_token_ids=frozenset({third}))


@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_stop_token_waits_for_the_least_length(width: int) -> None:
    short, long = stopping("short", PLAIN, 0), stopping("long", PLAIN, 9)
    hot = stopping("hot", NEGATIVE, 12)
    rows = (short, long, hot, PLAIN)
    said = play(tiny_lane(), *rows, width=width, drafter=knowing(rows, often))
    assert said == expected(rows)
    assert len(said["short"]) <= 3
    assert not (set(said["long"][:9]) & long.stop_token_ids)
    assert len(said["long"]) > 9


def test_a_least_length_counts_from_the_prompt_even_after_a_move() -> None:
    request = stopping("long", PLAIN, 9)
    said = speak(request).tokens
    moved = replace(
        request,
        tokens=request.tokens + said[:5],
        max_tokens=request.max_tokens - 5,
        prompt_length=len(request.tokens),
    )
    assert play(tiny_lane(), moved, width=8)["long"] == said[5:]


def test_a_stop_token_may_come_right_after_the_least_length() -> None:
    third = speak(PLAIN).tokens[2]
    eager_to_stop = replace(
        PLAIN,
        sampling=Sampling(min_tokens=4, logit_bias=((third, 100.0),)),
        stop_token_ids=frozenset({third}),
    )
    said = play(tiny_lane(), eager_to_stop, width=8)["plain"]
    assert len(said) == 5
    assert said[-1] == third


# What it costs others


def test_a_window_without_such_rows_has_none_of_their_arrays() -> None:
    arrays = pack([None, Sampling(), Sampling(temperature=1.0, min_p=0.1)], 128)
    assert arrays.biases is None
    assert arrays.penalties is None
    assert list(arrays.as_lists()) == ["rule"]


def test_a_row_beside_them_keeps_its_numbers_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    logits = mx.array(rng.normal(size=(3, 5, 128)), dtype=mx.float32)
    drafted = mx.array(rng.integers(0, 128, (3, 4)), dtype=mx.int32)
    positions = mx.broadcast_to(mx.arange(10, 15), (3, 5))
    neutral = SampledRow(Sampling(temperature=0.8, seed=4), (1, 2, 3), (4, 5), frozenset({6}))
    other = SampledRow(
        Sampling(presence_penalty=2.0, repetition_penalty=3.0, logit_bias=((1, 9.0),), min_tokens=99),
        (1, 2, 3),
        (4, 5),
        frozenset({6}),
    )
    alone = np.array(choose(logits, positions, pack([neutral] * 3, 128), drafted))
    beside = np.array(choose(logits, positions, pack([neutral, other, neutral], 128), drafted))
    assert (alone[[0, 2]] == beside[[0, 2]]).all()
    assert (alone[1] != beside[1]).any()


def test_rows_without_a_penalty_are_not_counted() -> None:
    said = SampledRow(Sampling(), (1, 2), (3, 3))
    asks = SampledRow(Sampling(frequency_penalty=1.0), (1, 2), (3, 3))
    penalties = Penalties.of([said, asks], 8)
    assert np.array(penalties.counts).tolist() == [[0] * 8, [0, 0, 0, 2, 0, 0, 0, 0]]
    assert not np.array(penalties.is_in_prompt).any()  # nobody has a repetition penalty


@pytest.mark.parametrize(
    ("settings", "stop", "param"),
    [
        ({"logit_bias": ((128, 1.0),)}, (), "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, (), "logit_bias"),
        ({"min_tokens": 2}, (128,), "stop_token_ids"),
        ({"min_tokens": 2}, range(128), "min_tokens"),
        ({"repetition_penalty": 0.0}, (), "repetition_penalty"),
    ],
)
def test_ids_that_would_be_written_out_of_bounds_are_refused(
    settings: dict[str, Any], stop: Sequence[int], param: str
) -> None:
    with opened(tiny_lane()) as window, pytest.raises(InvalidRequest) as caught:
        window.admit(row("bad", prompt(1, 4), stop=stop, **settings))
    assert caught.value.param == param
