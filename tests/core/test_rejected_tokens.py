"""What was rejected, what idles and what failed leaves no trace."""

from collections.abc import Iterator, Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.errors import RowFailed
from dflash_core.events import RoundReport
from dflash_core.protocols import FeatureBlock
from dflash_core.request import RowId, WindowId
from dflash_core.row_cache import RowCaches
from dflash_core.sampling import pack
from dflash_core.target import BlockInput, Outcome, Target
from dflash_core.window import Window
from tests.core.engine_fixtures import (
    VOCAB,
    ListedWidths,
    RowState,
    alone,
    eager,
    finish,
    make_lane,
    opened,
    play,
    progress_of,
    prompt,
    row,
    scripted,
    state_alone,
    tiny_lane,
    tokens_of,
)

POISON = 90


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def bits(caches: RowCaches, slot: int) -> list[bytes]:
    """A row's state, exactly."""
    return [part.tobytes() for parts in RowState(caches, slot).parts.values() for part in parts]


# Rejected drafts


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64], ids=["float32", "float64"])
def test_other_wrong_drafts_change_no_bit_of_what_follows(dtype: mx.Dtype) -> None:
    lane = tiny_lane(dtype)
    requests = [row(f"r{n}", prompt(n, n), 20) for n in (1, 5, 18, 33)]

    def num_right(row_id: str, length: int) -> int:
        return (length + int(row_id[1:])) % 5

    def run(salt: int) -> tuple[list[np.ndarray], list[list[bytes]], dict[str, tuple[int, ...]]]:
        drafter = scripted(lane, requests, num_right, salt=salt)
        with opened(lane, *requests, drafter=drafter, width=ListedWidths((8, 4, 1, 8, 2))) as window:
            reports = [window.step() for _ in range(6)]
            states = [bits(window.caches, slot) for slot in range(4)]
            reports += finish(window)
        return drafter.own, states, tokens_of(reports)

    first, second = run(0), run(40)
    assert all((a == b).all() for a, b in zip(first[0], second[0], strict=True))  # the real drafter's answers
    assert first[1] == second[1]
    assert first[2] == second[2]


def prefilled(target: Target, prompts: Sequence[Sequence[int]]) -> RowCaches:
    caches = target.new_caches(len(prompts), 1)
    counts = np.array([len(p) for p in prompts], dtype=np.int32)
    tokens = np.zeros((len(prompts), max(1, int(counts.max()))), dtype=np.int32)
    for slot, p in enumerate(prompts):
        tokens[slot, : len(p)] = p
    target.prefill(caches, tokens, counts, pack([None] * len(prompts), target.vocab_size))
    return caches


def verify(target: Target, caches: RowCaches, budgets: Sequence[int], block: np.ndarray) -> Outcome:
    """One round of ``block`` [B, K] (anchors and drafts), as a window would play it."""
    sampling = pack([None] * len(budgets), target.vocab_size)
    rows = BlockInput(mx.array(block[:, 0]), np.array(budgets, dtype=np.int32), sampling)
    outcome = target.verify(caches, rows, mx.array(block[:, 1:]), "per_row").read()
    caches.lengths += (outcome.accepted + 1).astype(np.int32)
    return outcome


def test_the_block_after_a_rejection_is_the_same_to_the_bit() -> None:
    """Through the target alone: behind the lengths lies other garbage, and the next block does not see it."""
    target = tiny_lane(mx.float32).target
    outcomes = []
    for salt in (0, 17):
        caches = prefilled(target, [prompt(1, 9), prompt(2, 20)])
        block = np.array([prompt(3, 8), prompt(4, 8)], dtype=np.int32)
        block[:, 1:] = (block[:, 1:] + salt) % VOCAB
        first = verify(target, caches, [50, 50], block)
        assert (first.accepted < 7).all()  # random drafts: something was rejected
        keep = caches.lengths.tolist()
        second = verify(target, caches, [50, 50], np.array([[5, 6], [7, 8]], dtype=np.int32))
        outcomes.append((keep, second.chosen.tolist(), [bits(caches, slot) for slot in range(2)]))
    assert outcomes[0] == outcomes[1]


def test_another_kept_token_does_change_what_follows() -> None:
    """The control of the two tests above."""
    target = tiny_lane(mx.float32).target
    states = []
    for anchor in (3, 4):
        caches = prefilled(target, [prompt(1, 9)])
        verify(target, caches, [50], np.array([[anchor, 100, 101, 102]], dtype=np.int32))
        verify(target, caches, [50], np.array([[5, 6]], dtype=np.int32))
        states.append(bits(caches, 0))
    assert states[0] != states[1]


# Idle slots


def test_idle_slots_do_not_advance_and_do_not_matter() -> None:
    target = tiny_lane(mx.float32).target
    block = np.array([prompt(5, 4), (0, 0, 0, 0), prompt(6, 4), (9, 9, 9, 9)], dtype=np.int32)
    results = []
    for scale in (0.0, 1.0, 1e6):
        caches = prefilled(target, [prompt(1, 9), (), prompt(2, 30), ()])
        rng = np.random.default_rng(0)
        for slot in (1, 3):
            fill_with_garbage(caches, slot, rng, scale)
        before = [RowState(caches, slot) for slot in (1, 3)]
        outcomes = [verify(target, caches, [50, 0, 50, 0], block) for _ in range(3)]
        assert all(outcome.accepted[[1, 3]].tolist() == [-1, -1] for outcome in outcomes)
        assert caches.lengths[[1, 3]].tolist() == [0, 0]
        after = [RowState(caches, slot) for slot in (1, 3)]
        assert [a.difference(b) for a, b in zip(before, after, strict=True)] == [0, 0]
        results.append((outcomes[-1].chosen[[0, 2]].tolist(), bits(caches, 0), bits(caches, 2)))
    assert results[0] == results[1] == results[2]


def fill_with_garbage(caches: RowCaches, slot: int, rng: np.random.Generator, scale: float) -> None:
    """Finite garbage, in place."""
    arrays = caches.arrays
    for x in (*arrays.keys, *arrays.values):
        x[slot] = mx.array(scale * rng.normal(size=x[slot].shape), dtype=x.dtype)
    for x in (arrays.states, arrays.conv):
        x[:, slot] = mx.array(scale * rng.normal(size=x[:, slot].shape), dtype=x.dtype)


# Context limit


@pytest.mark.parametrize("width", [1, 16])
def test_a_row_at_the_context_limit_beside_a_row_of_length_one(width: int) -> None:
    lane = make_lane(max_context=128)
    full, short = row("full", prompt(1, 120), 8), row("short", prompt(2, 1), 30)
    drafter = scripted(lane, [full, short], 16)
    with opened(lane, full, short, width=width, drafter=drafter) as window:
        reports = finish(window)
    assert tokens_of(reports) == {r.row_id: alone(lane, r) for r in (full, short)}
    assert progress_of(reports, "full")[-1].finish == "length"
    assert len(alone(lane, full)) == 8


def test_a_wide_block_at_the_limit_keeps_its_state() -> None:
    """A context of C needs room for C + K tokens; a neighbour's slots are not overwritten."""
    lane = make_lane(max_context=128)
    full, beside = row("full", prompt(1, 119), 9), row("beside", prompt(2, 40), 30)
    drafter = scripted(lane, [full, beside], lambda row_id, _length: 1 if row_id == "full" else 0)
    with opened(lane, full, beside, width=16, drafter=drafter) as window:
        reports = [window.step() for _ in range(5)]
        assert {p.row_id for p in reports[-1].rows} == {"full", "beside"}
        slot = next(i for i, r in enumerate(window.rows) if r is not None and r.row_id == "beside")
        length = int(window.caches.lengths[slot])
        tokens = (*beside.tokens, *alone(lane, beside))[:length]
        assert RowState(window.caches, slot).difference(state_alone(lane.target, tokens)) < 1e-9


# Rows that fail


def poison_cache(window: Window, slot: int, part: str) -> None:
    """Everywhere in the slot, also where its row has not been."""
    arrays, nan = window.caches.arrays, mx.array(mx.nan)
    if part == "keys":
        arrays.keys[0][slot] = nan
    elif part == "values":
        arrays.values[-1][slot] = nan
    elif part == "states":
        arrays.states[0, slot, 0, 0, 0] = nan
    else:
        arrays.conv[0, slot, -1, 0] = nan


def failed(reports: Sequence[RoundReport], name: str) -> bool:
    """Whether the row ended with its own error, without a token in that round."""
    last = progress_of(reports, name)[-1]
    return (last.finish, last.error_kind, last.tokens) == ("error", RowFailed.kind, ())


PARTS = pytest.mark.parametrize("part", ["keys", "values", "states", "conv"])
FOUR = tuple(row(f"r{n}", prompt(n, n), 20) for n in (3, 8, 15, 21))


@cache
def play_four(width: int, part: str | None) -> tuple[list[RoundReport], dict[RowId, list[bytes]]]:
    """Reports, and states after five steps; ``part`` of r15's state is made NaN after two."""
    drafter = scripted(tiny_lane(), FOUR, lambda _row, length: length % 3)
    with opened(tiny_lane(), *FOUR, width=width, drafter=drafter) as window:
        reports = [window.step(), window.step()]
        if part is not None:
            poison_cache(window, 2, part)
        reports += [window.step() for _ in range(3)]
        states = {r.row_id: bits(window.caches, i) for i, r in enumerate(window.rows) if r is not None}
        return reports + finish(window), states


@pytest.mark.parametrize("width", [1, 8])
@PARTS
def test_a_row_made_nan_ends_with_its_own_error_and_disturbs_nobody(part: str, width: int) -> None:
    quiet, quiet_states = play_four(width, None)
    disturbed, states = play_four(width, part)
    assert failed(disturbed, "r15")
    assert len(progress_of(disturbed, "r15")) == 3
    others = [request.row_id for request in FOUR if request.row_id != "r15"]
    assert states == {name: quiet_states[name] for name in others}
    for name in others:
        assert tokens_of(disturbed)[name] == tokens_of(quiet)[name]
        assert progress_of(disturbed, name)[-1].finish == "length"


@cache
def late_in(slot_was: str) -> tuple[list[list[int]], list[bytes]]:
    """What the real drafter says of a row, and the row's state two rounds on.

    Its slot was nobody's ("fresh"), or that of a row that was retired, or made NaN in the part that is named.
    """
    lane = tiny_lane()
    other, victim, late = (
        row("other", prompt(2, 140), 60),  # keeps the slots longer than what the late row brings along
        row("victim", prompt(1, 140), 60),
        row("late", (5, 6), 14),
    )
    drafter = scripted(lane, [other, victim, late], lambda _row, length: length % 3)
    with opened(lane, other, drafter=drafter, max_rows=2) as window:
        if slot_was != "fresh":
            window.admit(victim)
        reports = [window.step() for _ in range(4)]  # three chunks
        assert window.num_live == (1 if slot_was == "fresh" else 2)
        if slot_was == "retired":
            window.retire(victim.row_id)
        elif slot_was != "fresh":
            poison_cache(window, 1, slot_was)
            reports.append(window.step())
            assert failed(reports, "victim")
        window.admit(late)
        reports += [window.step(), window.step()]
        assert [r and r.row_id for r in window.rows] == ["other", "late"]
        state = bits(window.caches, 1)
        reports += finish(window)
    assert tokens_of(reports)["late"] == alone(lane, late)
    drafts = [
        own[block.row_ids.index(late.row_id)].tolist()
        for (block, _), own in zip(drafter.calls, drafter.own, strict=True)
        if late.row_id in block.row_ids
    ]
    return drafts, state


@pytest.mark.parametrize("slot_was", ["retired", "keys", "values", "states", "conv"])
def test_a_slot_that_was_anothers_is_to_the_bit_as_good_as_a_fresh_one(slot_was: str) -> None:
    drafts, state = late_in("fresh")
    assert len(drafts) > 3
    assert late_in(slot_was) == (drafts, state)


# Prompts that fail: the embedding of one token is not a number


def test_a_prompt_made_nan_fails_alone_and_its_slots_are_reused() -> None:
    lane = make_lane(poisoned_token=POISON)
    assert POISON not in (*prompt(2, 30), *prompt(3, 4), *prompt(4, 7))
    bad = row("bad", (*prompt(2, 20), POISON, *prompt(3, 4)), 10)
    good, late = row("good", prompt(2, 30), 16), row("late", prompt(4, 7), 16)
    # A scripted drafter: a draft that is not finite would end a row that is.
    drafter = scripted(lane, [good, late], lambda _row, length: length % 4, avoid=POISON)
    with opened(lane, bad, good, late, max_rows=2, drafter=drafter) as window:
        reports = finish(window)
    assert failed(reports, "bad")
    assert len(progress_of(reports, "bad")) == 1
    assert {name: tokens_of(reports)[name] for name in ("good", "late")} == {
        "good": alone(lane, good),
        "late": alone(lane, late),
    }


def test_a_prompt_made_nan_and_retired_half_read_leaves_nothing_behind() -> None:
    lane = make_lane(poisoned_token=POISON)
    bad, late = row("bad", (POISON,) * 64, 4), row("late", prompt(4, 7), 12)
    with opened(lane, bad, prefill_chunk=16) as window:
        window.step()
        window.step()
        window.retire(bad.row_id)
        window.admit(late)
        reports = finish(window)
    assert tokens_of(reports) == {"late": alone(lane, late)}
    assert progress_of(reports, "late")[-1].finish == "length"


def test_features_that_are_not_finite_stay_with_their_row() -> None:
    """A prompt in staging is not touched by a neighbour's, nor is a slot that idles."""
    lane, size = tiny_lane(), 32
    rng = np.random.default_rng(0)
    fine = mx.array(rng.normal(size=(1, 6, size)), dtype=mx.float64)
    late = mx.array(rng.normal(size=(1, 3, size)), dtype=mx.float64)

    def block(name: str, x: mx.array) -> FeatureBlock:
        counts = np.array([x.shape[1]], dtype=np.int32)
        return FeatureBlock((RowId(name),), np.zeros(1, dtype=np.int32), counts, x)

    def drafts(neighbour: mx.array) -> list[list[int]]:
        window = WindowId("features")
        lane.drafter.extend(window, block("fine", fine))
        lane.drafter.extend(window, block("neighbour", neighbour))
        lane.drafter.drop(window, (RowId("neighbour"),))
        lane.drafter.extend(window, block("late", late))
        rows = (RowId("fine"), RowId("late"))
        ends = np.array([6, 3], dtype=np.int32)
        nothing = FeatureBlock(
            rows, ends, np.zeros(2, dtype=np.int32), mx.zeros((2, 1, size), dtype=mx.float64)
        )
        ids = lane.drafter.draft(window, nothing, mx.array([7, 8], dtype=mx.int32), 8).wait().ids
        lane.drafter.close(window)
        return np.array(ids).tolist()

    clean = drafts(mx.zeros((1, 40, size), dtype=mx.float64))
    assert len({*clean[0], *clean[1]}) > 1
    assert drafts(mx.full((1, 40, size), mx.nan, dtype=mx.float64)) == clean


def test_a_window_goes_on_drafting_well_beside_and_after_rows_that_fail() -> None:
    """Classic rounds leave a prompt staged while the next, which is not finite, is read beside it."""
    lane = make_lane(poisoned_token=POISON)
    first, bad, late = (
        row("first", prompt(2, 12), 40),
        row("bad", (POISON,) * 70, 4),
        row("late", prompt(4, 7), 20),
    )

    def drafts(requests: Sequence[str]) -> list[list[int]]:
        known = {"first": first, "bad": bad, "late": late}
        drafter = scripted(lane, [first, late], 0, avoid=POISON)
        with opened(
            lane, first, drafter=drafter, width=ListedWidths((1, 1, 1, 8)), prefill_chunk=16
        ) as window:
            reports = [window.step()]
            for name in requests:
                window.admit(known[name])
            reports += finish(window)
        for request in (first, late):
            if request.row_id in tokens_of(reports):
                assert tokens_of(reports)[request.row_id] == alone(lane, request)
        found = []
        for (block, width), own in zip(drafter.calls, drafter.own, strict=True):
            if width > 1 and first.row_id in block.row_ids:
                found.append(own[block.row_ids.index(first.row_id)].tolist())
        return found

    with_bad = drafts(["bad", "late"])
    assert with_bad == drafts(["late"])
    assert len({token for ids in with_bad for token in ids}) > 1


def test_every_other_test_here_plays_real_rounds() -> None:
    """The control for fixtures: the lane speaks, and not the same token over and over."""
    lane = tiny_lane()
    request = row("r", prompt(1, 5), 20)
    said = play(lane, request)["r"]
    assert said == alone(lane, request)
    assert len(set(said)) > 5
