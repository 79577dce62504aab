"""Prefix reuse: what begins from a saved state says what it says from the start, and drafts as well."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from dflash_core.events import RoundReport
from dflash_core.loading import LoadedLane
from dflash_core.parity import compare
from dflash_core.prefix_store import Origin, PrefixStore
from dflash_core.prefixes import LEAST_GAIN, Prefixes, SavedContext, Snapshot
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.saved_row import SavedRow, copy_in
from dflash_core.window import Window
from tests.core.engine_fixtures import (
    WINDOW,
    NumRight,
    RowState,
    ScriptedDrafter,
    alone,
    difference,
    eager,
    finish,
    local,
    make_lane,
    open_window,
    progress_of,
    prompt,
    row,
    state_alone,
    tiny_lane,
    tokens_of,
)
from tests.core.grammar_fixtures import follower, grammar_lane, spelled

HERE = Origin("target", "drafter", "float64")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.1, "seed": 6, "repetition_penalty": 1.2, "min_tokens": 3},
)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


class KeepingDrafter(ScriptedDrafter):
    """A scripted drafter over a real one that hands out contexts."""

    def save(self, window_id: WindowId, row_id: RowId, length: int) -> SavedContext | None:
        return local(tiny_lane()).save(window_id, row_id, length)

    def restore(self, window_id: WindowId, row_id: RowId, saved: SavedContext) -> None:
        local(tiny_lane()).restore(window_id, row_id, saved)


def keeping(requests: Sequence[RowRequest], num_right: NumRight | int) -> KeepingDrafter:
    endless = (replace(r, stop_token_ids=frozenset()) for r in requests)
    scripts = {r.row_id: (*r.tokens, *alone(tiny_lane(), r)) for r in endless}
    return KeepingDrafter(tiny_lane().drafter, scripts, num_right)


def new_store(limit: int = 2**30) -> PrefixStore[Snapshot]:
    return PrefixStore(limit)


def window_over(
    store: PrefixStore[Snapshot],
    drafter: KeepingDrafter,
    origin: Origin = HERE,
    width: int = 8,
    **policy: Any,
) -> Window:
    window = open_window(tiny_lane(), width=width, drafter=drafter, **policy)
    prefixes = Prefixes(store, origin, drafter)
    return Window(window.window_id, window.target, drafter, window.policy, prefixes)


def played(
    store: PrefixStore[Snapshot], *requests: RowRequest, right: NumRight | int = 4, **options: Any
) -> tuple[list[RoundReport], KeepingDrafter]:
    drafter = keeping(requests, right)
    window = window_over(store, drafter, **options)
    for request in requests:
        window.admit(request)
    try:
        return finish(window), drafter
    finally:
        window.close()


def cached(reports: Sequence[RoundReport], name: str) -> int:
    return sum(progress.cached_tokens for progress in progress_of(reports, name))


def rounds(reports: Sequence[RoundReport], name: str) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(p.walked, p.accepted, p.tokens) for p in progress_of(reports, name)]


def next_turn(request: RowRequest, name: str, extra: int, save: int) -> RowRequest:
    """What the chat says next: the first turn, its answer and a message more."""
    said = alone(tiny_lane(), request)
    tokens = (*request.tokens, *said, *prompt(900 + extra, extra))
    return replace(request, row_id=RowId(name), tokens=tokens, save_at=(len(tokens) - save,))


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_a_second_turn_says_in_any_company_what_it_says_from_the_start(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=3), label="samplings")
    right = data.draw(st.sampled_from((0, 3, 7)), label="right drafts")
    first, second = [], []
    for number, sampling in enumerate(kinds):
        length = data.draw(st.sampled_from((18, 70)), label="length")
        request = row(f"first {number}", prompt(40 + number, length), 9, **sampling)
        first.append(replace(request, save_at=(length // 2, length - 3)))
        second.append(next_turn(first[-1], f"second {number}", 5 + 9 * number, 3))
    stranger = row("stranger", prompt(77, 30), 14)
    store = new_store()
    played(store, *first, right=right)
    reports, _ = played(store, *second, stranger, right=right)
    for request in (*second, stranger):
        assert tokens_of(reports)[request.row_id] == alone(tiny_lane(), request)
    # A turn that played to the end of its budget stands on all but its last token.
    assert [cached(reports, r.row_id) for r in second] == [len(r.tokens) + 8 for r in first]
    assert cached(reports, "stranger") == 0


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]])
def test_rounds_of_a_warm_row_are_those_of_a_cold_one(sampling: dict[str, Any]) -> None:
    """The drafter's own words too: its context is whole, at the true positions."""
    first = replace(row("first", prompt(1, 50), 10, **sampling), save_at=(20, 47))
    second = next_turn(first, "second", 12, 4)
    store = new_store()
    played(store, first)
    warm, warm_drafter = played(store, second)
    cold, cold_drafter = played(new_store(), second)
    assert cached(warm, "second") == 59
    assert cached(cold, "second") == 0
    assert rounds(warm, "second") == rounds(cold, "second")
    assert sum(p.accepted for p in progress_of(warm, "second")) > 0
    assert len(warm_drafter.own) == len(cold_drafter.own) > 0
    for here, there in zip(warm_drafter.own, cold_drafter.own, strict=True):
        assert here.tolist() == there.tolist()


@pytest.mark.parametrize("width", [1, 8])
def test_a_row_that_begins_from_a_saved_state_has_the_state_of_one_that_read_it_all(width: int) -> None:
    """Target and context; at width 1 most features have not been taken when the turn ends."""
    first = replace(row("first", prompt(2, 33), 7), save_at=(30,))
    second = replace(next_turn(first, "second", 9, 2), max_tokens=30)
    store = new_store()
    played(store, first, width=width)
    states: list[tuple[RowState, RowState]] = []
    for start in (store, new_store()):
        window = window_over(start, keeping((second,), 2), width=4)
        window.admit(second)
        window.step()
        while not window.num_live:
            window.step()
        window.step()
        slot = window.rows.index(next(r for r in window.rows if r is not None))
        session = local(tiny_lane())._sessions[WINDOW]
        context = session.live.slot_of(RowId("second"))
        assert context is not None
        states.append((RowState(window.caches, slot), RowState(session.live.caches, context)))
        window.close()
    (warm, warm_context), (cold, cold_context) = states
    assert warm.difference(cold) < 1e-9
    assert warm_context.length == cold_context.length
    for part in ("keys", "values"):
        pairs = zip(warm_context.parts[part], cold_context.parts[part], strict=True)
        assert max(difference(a, b) for a, b in pairs) < 1e-9


def test_a_saved_state_is_that_of_its_tokens_whatever_its_row_did_afterwards() -> None:
    first = replace(row("first", prompt(3, 60), 20), save_at=(25, 57))
    store = new_store()
    played(store, first)
    said = (*first.tokens, *alone(tiny_lane(), first))
    for length in (25, 57, 79):
        assert_state(store, said[:length])


def assert_state(store: PrefixStore[Snapshot], tokens: tuple[int, ...]) -> None:
    """Just these tokens are saved, with the state of a row that read them by itself."""
    found = store.find(HERE, (*tokens, 0))
    assert found is not None
    assert found.row.length == len(tokens)
    caches = tiny_lane().target.new_caches(1, 1)
    copy_in(caches, 0, found.row)
    assert RowState(caches, 0).difference(state_alone(tiny_lane().target, tokens)) < 1e-9


@pytest.mark.parametrize("beyond", [-1, 0, 2])
def test_a_turn_that_a_stop_token_cuts_leaves_only_what_it_emitted(beyond: int) -> None:
    """The stop token is the bonus, the last accepted draft, or one with accepted drafts behind it."""
    request = row("first", prompt(4, 20), 20)
    said = alone(tiny_lane(), request)
    place = next(i for i in range(3, 20) if said.index(said[i]) == i)
    request = replace(request, stop_token_ids=frozenset({said[place]}), save_at=(17,))
    store = new_store()
    reports, _ = played(store, request, right=place + beyond, width=16)
    assert tokens_of(reports)["first"] == said[: place + 1]
    emitted = (*request.tokens, *said[: place + 1])
    saved = [n for n in range(18, 41) if store.has(HERE, (*request.tokens, *said)[:n])]
    if beyond > 0:
        assert saved == []
        return
    assert saved == [len(emitted) + beyond]
    assert_state(store, emitted[: saved[0]])


def test_a_chat_whose_thoughts_are_taken_out_goes_on_from_the_last_boundary() -> None:
    """The next prompt is not what was said: only the place before the generation prompt is shared."""
    first = replace(row("first", prompt(5, 40), 12), save_at=(37,))
    store = new_store()
    played(store, first)
    second = replace(first, row_id=RowId("second"), tokens=(*first.tokens[:38], *prompt(6, 25)))
    reports, _ = played(store, second)
    assert cached(reports, "second") == 37
    assert tokens_of(reports)["second"] == alone(tiny_lane(), second)


def test_a_row_that_moved_begins_from_what_its_prompt_left_here() -> None:
    """Its target died: prompt and committed tokens are read elsewhere, where the chat is known."""
    first = replace(row("first", prompt(7, 40), 16, temperature=0.8, seed=3), save_at=(37,))
    said = alone(tiny_lane(), first)
    store = new_store()
    played(store, replace(first, max_tokens=1))
    moved = replace(
        first, tokens=(*first.tokens, *said[:6]), prompt_length=40, max_tokens=10, row_id=RowId("moved")
    )
    reports, _ = played(store, moved)
    assert sum(report.prefixes.found for report in reports if report.prefixes is not None) == 37
    assert cached(reports, "moved") == 0  # its client was told of the first time
    assert tokens_of(reports)["moved"] == said[6:]


def test_a_prompt_whose_tokens_are_to_be_measured_is_read_whole() -> None:
    first = replace(row("first", prompt(8, 40), 4), save_at=(37,))
    store = new_store()
    played(store, first)
    measured = replace(first, row_id=RowId("again"), num_top_logprobs=2, wants_prompt_logprobs=True)
    reports, _ = played(store, measured)
    assert cached(reports, "again") == 0
    assert sum(len(p.prompt_logprobs) for p in progress_of(reports, "again")) == 39


def test_what_was_made_by_others_is_not_used() -> None:
    first = replace(row("first", prompt(9, 40), 4), save_at=(37,))
    store = new_store()
    played(store, first)
    others = (replace(HERE, target="x"), replace(HERE, drafter="x"), replace(HERE, dtype="float32"))
    for origin in others:
        reports, _ = played(store, replace(first, row_id=RowId("again")), origin=origin)
        assert cached(reports, "again") == 0
    reports, _ = played(store, replace(first, row_id=RowId("again")))
    assert cached(reports, "again") == 37


def say(lane: LoadedLane, request: RowRequest, store: PrefixStore[Snapshot]) -> tuple[tuple[int, ...], int]:
    """What a row says with the lane's own drafter, and how many of its tokens were saved."""
    policy, drafter = open_window(lane).policy, local(lane)
    window = Window(WINDOW, lane.target, drafter, policy, Prefixes(store, HERE, drafter))
    window.admit(request)
    reports = finish(window)
    window.close()
    return tokens_of(reports)[request.row_id], cached(reports, request.row_id)


def test_a_grammar_begins_behind_the_prompt_wherever_its_chunks_end() -> None:
    lane, store = grammar_lane(), new_store()
    grammar = LLMatcher.grammar_from_regex("[a-z]{2,6}( [a-z]{2,6}){0,2}")
    plain = follower("plain", grammar, prompt(16, 60), 40, temperature=1.5, seed=21)
    cut = replace(plain, save_at=(20, 57))
    answers = [say(lane, request, store) for request in (plain, cut, cut)]
    assert [num_cached for _, num_cached in answers] == [0, 0, 57]
    assert re.fullmatch("[a-z ]+", spelled(answers[0][0]))
    assert answers[0][0] == answers[1][0] == answers[2][0]


@pytest.mark.parametrize("kind", ["bfloat16", "4-bit"])
def test_warm_rows_of_low_precision_pass_the_gate_against_cold_ones(kind: str) -> None:
    lane = make_lane(mx.bfloat16) if kind == "bfloat16" else make_lane(mx.float32, quantize=4)
    store = new_store()
    first = replace(row("first", prompt(14, 60), 12), save_at=(57,))
    said, _ = say(lane, first, store)
    second = row("second", (*first.tokens, *said, *prompt(15, 8)), 16)
    warm, num_cached = say(lane, second, store)
    cold, _ = say(lane, second, new_store())
    assert num_cached == 71
    verdict = compare(lane.target, second, cold, warm)
    assert verdict.passes(1.0), verdict


def test_a_row_that_is_not_finite_leaves_nothing() -> None:
    lane = make_lane(poisoned_token=100)
    store = new_store()
    tokens = tuple(t if t != 100 else 99 for t in prompt(10, 40))
    poisoned = (*tokens[:10], 100, *tokens[11:])
    for name, spoken in (("bad", poisoned), ("good", tokens)):
        drafter = local(lane)
        window = open_window(lane)
        window = Window(WINDOW, lane.target, drafter, window.policy, Prefixes(store, HERE, drafter))
        window.admit(replace(row(name, spoken, 4), save_at=(5, 37)))
        finish(window)
        window.close()
        if name == "bad":
            assert len(store) == 0
    assert store.has(HERE, tokens[:37])


def test_places_close_behind_a_beginning_are_passed_over() -> None:
    first = replace(row("first", prompt(11, 40), 9), save_at=(37,))
    store = new_store()
    played(store, first)
    second = next_turn(first, "second", 30, 5)
    near = 48 + LEAST_GAIN - 1
    second = replace(second, save_at=(50, near, 75))
    reports, _ = played(store, second)
    assert cached(reports, "second") == 48
    kept = [length for length in (50, near, 75) if store.has(HERE, second.tokens[:length])]
    assert kept == [75]


def test_lookups_and_bytes_are_told() -> None:
    first = replace(row("first", prompt(12, 40), 9), save_at=(37,))
    store = new_store()
    played(store, first)
    reports, _ = played(store, next_turn(first, "second", 10, 3))
    told = [report.prefixes for report in reports if report.prefixes is not None]
    assert len(told) == len(reports)
    assert sum(counts.queried for counts in told) == 59
    assert sum(counts.found for counts in told) == 48
    assert told[-1].num_bytes == store.num_bytes > 0
    assert sum(report.prefilled_tokens for report in reports) == 59 - 48


# The store


def test_the_longest_prefix_that_leaves_something_to_read_is_found() -> None:
    store: PrefixStore[str] = PrefixStore(100)
    for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 9, 3)):
        store.save(HERE, tokens, str(tokens), 10)
    assert store.find(HERE, (1, 2, 3, 4, 5)) == "(1, 2, 3, 4)"
    assert store.find(HERE, (1, 2, 3, 4, 5, 6)) == "(1, 2, 3, 4, 5)"
    assert store.find(HERE, (1, 2, 9)) == "(1, 2)"
    assert store.find(HERE, (1, 2)) is None
    assert store.find(HERE, (258, 2, 3)) is None  # 258 has the bytes of 2 in its first one


def test_the_least_recently_used_goes_first_and_bytes_never_exceed_the_limit() -> None:
    store: PrefixStore[str] = PrefixStore(30)
    for name in "abc":
        store.save(HERE, (ord(name),), name, 10)
    assert store.find(HERE, (ord("a"), 0)) == "a"
    store.save(HERE, (ord("d"),), "d", 10)
    assert [name for name in "abcd" if store.has(HERE, (ord(name),))] == ["a", "c", "d"]
    store.save(HERE, (ord("e"),), "e", 25)
    assert [name for name in "abcde" if store.has(HERE, (ord(name),))] == ["e"]
    assert store.num_bytes == 25
    store.save(HERE, (ord("f"),), "f", 31)
    assert not store.has(HERE, (ord("f"),))
    store.save(HERE, (ord("e"),), "e again", 5)
    assert (len(store), store.num_bytes) == (1, 5)


def test_snapshots_are_counted_as_large_as_they_are() -> None:
    first = replace(row("first", prompt(13, 40), 3), save_at=(37,))
    store = new_store()
    played(store, first)
    found = store.find(HERE, first.tokens)
    assert found is not None
    s = tiny_lane().target.cache_shape
    context = found.context.content
    assert isinstance(context, SavedRow)
    arrays = [*found.row.keys, *found.row.values, *found.row.recurrent, *context.keys, *context.values]
    assert found.num_bytes == sum(np.array(x).nbytes for x in arrays)
    assert found.row.num_bytes == s.bytes_per_row(37)
