"""Grammars: the same tokens as one row that speaks one token at a time under the same grammar."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from dflash_core import constraint as constraint_module
from dflash_core import window as window_module
from dflash_core.constraint import Constraint, compile_constraint, unconstrained
from dflash_core.errors import InvalidRequest, RowFailed
from dflash_core.events import RoundReport
from dflash_core.parity import compare
from dflash_core.processors import allowed_only
from dflash_core.request import RowId, RowRequest
from dflash_core.text.grammar import MAX_GRAMMAR_BYTES, Grammars
from tests.core.engine_fixtures import (
    VOCAB,
    ListedWidths,
    ScriptedDrafter,
    eager,
    finish,
    opened,
    play,
    progress_of,
    prompt,
    row,
    tiny_lane,
    tokens_of,
)
from tests.core.grammar_fixtures import END, ascii_tokenizer, follower, grammar_lane, spelled
from tests.core.sampling_reference import allowed, speak
from tests.core.test_round import counting_reads

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "l": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "l", "n"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
REGEX = "[a-z]{2,6}( [a-z]{2,6}){0,2}"
WORDS = LLMatcher.grammar_from_regex(REGEX)
HOT = {"temperature": 1.5, "seed": 21}

OBJECT = follower("object", JSON, prompt(1, 9), 60)
HOT_OBJECT = follower("hot object", JSON, prompt(2, 12), 60, **HOT)
PHRASE = follower("phrase", WORDS, prompt(3, 5), 40, top_k=40, top_p=0.9, min_p=0.01, **HOT)
WISHFUL = follower(
    "wishful",
    WORDS,
    prompt(4, 21),
    40,
    logit_bias=((END, 2.0), (30, 3.0), (31, -100.0)),
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    min_tokens=7,
)
FOLLOWERS = (OBJECT, HOT_OBJECT, PHRASE, WISHFUL)
FREE = row("free", prompt(5, 7), 20)
HOT_FREE = row("hot free", prompt(6, 30), 20, presence_penalty=0.4, **HOT)
ALL = (FREE, *FOLLOWERS, HOT_FREE)


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
    return (3 * length + len(row_id)) % 16


def test_the_reference_follows_its_grammars_and_would_not_without() -> None:
    """The control, and what the answers are like."""
    for request in (OBJECT, HOT_OBJECT):
        said = speak(request).tokens
        value = json.loads(spelled(said))
        assert list(value) == SCHEMA["required"]
        assert said[-1] in request.stop_token_ids
    for request in (PHRASE, WISHFUL):
        assert re.fullmatch(REGEX, spelled(speak(request).tokens))
    for request in FOLLOWERS:
        assert speak(replace(request, grammar=None, max_tokens=8)).tokens != speak(request).tokens[:8]


@pytest.mark.parametrize(
    ("request_", "width"),
    [(OBJECT, 1), (OBJECT, 16), (PHRASE, 16), (WISHFUL, 16)],
    ids=lambda v: getattr(v, "row_id", v),
)
def test_a_row_alone_says_what_the_reference_says(request_: RowRequest, width: int) -> None:
    drafter = knowing([request_], often)
    assert play(grammar_lane(), request_, width=width, drafter=drafter) == expected([request_])


@pytest.mark.parametrize("widths", [(1,), (16, 1, 4)], ids=str)
def test_so_does_every_row_of_a_mixed_batch(widths: tuple[int, ...]) -> None:
    drafter = knowing(ALL, often)
    assert play(grammar_lane(), *ALL, width=ListedWidths(widths), drafter=drafter) == expected(ALL)


def test_so_does_it_with_a_real_drafter_and_refilled_slots() -> None:
    assert play(grammar_lane(), *ALL, width=8, max_rows=2) == expected(ALL)


def test_a_row_that_moved_goes_on_where_its_grammar_was() -> None:
    committed, moved = 4, []
    for request in FOLLOWERS:
        tokens = request.tokens + speak(request).tokens[:committed]
        rest = request.max_tokens - committed
        moved.append(replace(request, tokens=tokens, max_tokens=rest, prompt_length=len(request.tokens)))
    played = play(grammar_lane(), *moved, width=4)
    assert played == {r.row_id: speak(r).tokens[committed:] for r in FOLLOWERS}


def test_a_whole_block_of_right_drafts_is_kept() -> None:
    """Each place of a block is masked by what was drafted before it."""
    said = speak(OBJECT).tokens
    with opened(grammar_lane(), OBJECT, width=16, drafter=knowing([OBJECT], 15)) as window:
        reports = finish(window)
    assert tokens_of(reports)["object"] == said
    assert len([report for report in reports if report.width]) == -(-(len(said) - 1) // 16)


# Ends


def test_an_answer_ends_with_its_grammar_or_is_cut() -> None:
    short = replace(OBJECT, row_id=RowId("short"), max_tokens=8)
    with opened(grammar_lane(), OBJECT, short) as window:
        reports = finish(window)
    assert progress_of(reports, "object")[-1].finish == "stop"
    assert progress_of(reports, "short")[-1].finish == "length"
    assert tokens_of(reports)["short"] == speak(OBJECT).tokens[:8]


@pytest.mark.parametrize("width", [1, 8])
def test_a_least_length_bars_the_end_until_the_grammar_leaves_nothing_else(width: int) -> None:
    rows = (
        follower("may go on", LLMatcher.grammar_from_regex("[ab]{1,20}"), prompt(7, 6), 30, min_tokens=9),
        follower("may not", LLMatcher.grammar_from_regex("[ab]{3}"), prompt(8, 6), 30, min_tokens=9),
    )
    rows = tuple(
        replace(r, sampling=replace(r.sampling, logit_bias=((END, 90.0),))) for r in rows
    )  # it would stop at once
    said = play(grammar_lane(), *rows, width=width, drafter=knowing(rows, often))
    assert said == expected(rows)
    assert {name: len(tokens) for name, tokens in said.items()} == {"may go on": 10, "may not": 4}


# Failures


class FailingConstraint(Constraint):
    """Breaks down the third time that it is asked."""

    num_calls = 0

    def allow(self, places: np.ndarray, drafted: Sequence[int]) -> int:
        FailingConstraint.num_calls += 1
        if FailingConstraint.num_calls == 3:
            raise ZeroDivisionError("inside a library")
        return super().allow(places, drafted)


def test_a_matcher_that_breaks_down_ends_its_row_and_touches_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(request: RowRequest, *arguments: Any) -> Future[Constraint] | None:
        future = compile_constraint(request, *arguments)
        if request.row_id == "object" and future is not None:
            sound = future.result()
            future = Future[Constraint]()
            future.set_result(FailingConstraint(sound.matcher, sound.stops, sound.num_early))
        return future

    monkeypatch.setattr(window_module, "compile_constraint", compiled)
    with opened(grammar_lane(), *ALL, width=4, drafter=knowing(ALL, often)) as window:
        reports = finish(window)
    last = progress_of(reports, "object")[-1]
    assert (last.finish, last.error_kind) == ("error", RowFailed.kind)
    assert last.error == "the grammar cannot be followed"  # a library's own words are for the log
    said = tokens_of(reports)
    assert said.pop("object") == speak(OBJECT).tokens[: len(tokens_of(reports)["object"])]
    assert said == expected([request for request in ALL if request is not OBJECT])


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (follower("bad", "start: nothing", prompt(1, 9), 5), InvalidRequest.kind),
        (follower("bad", "start: " + '"x" ' * MAX_GRAMMAR_BYTES, prompt(1, 9), 5), InvalidRequest.kind),
        (replace(OBJECT, row_id=RowId("bad"), prompt_length=3), RowFailed.kind),  # what was said is no JSON
        (follower("bad", 'start: "é"', prompt(1, 9), 5), InvalidRequest.kind),  # in no token
    ],
    ids=["wrong", "too large", "does not fit", "cannot be said"],
)
def test_a_grammar_that_cannot_be_used_ends_its_row_alone(request_: RowRequest, kind: str) -> None:
    with opened(grammar_lane(), FREE, request_, OBJECT) as window:
        reports = finish(window)
    (only,) = progress_of(reports, "bad")
    assert (only.finish, only.error_kind, only.tokens) == ("error", kind, ())
    assert tokens_of(reports) == expected([FREE, OBJECT]) | {"bad": ()}


@pytest.mark.parametrize("width", [1, 8])
def test_a_grammar_that_leads_nowhere_ends_its_row_there(width: int) -> None:
    """Not with token 0, which is what the arg-max of nothing would be."""
    lost = follower("lost", 'start: "abcé"', prompt(1, 9), 9)
    letters = [ascii_tokenizer().encode(letter)[0] for letter in "abc"]
    scripts = {lost.row_id: (*lost.tokens, *letters, 0, 0), FREE.row_id: FREE.tokens}
    drafter = ScriptedDrafter(tiny_lane().drafter, scripts, 7)
    with opened(grammar_lane(), lost, FREE, width=width, drafter=drafter) as window:
        reports = finish(window)
    assert tokens_of(reports) == expected([FREE]) | {"lost": tuple(letters)}
    last = progress_of(reports, "lost")[-1]
    assert (last.finish, last.error_kind) == ("error", RowFailed.kind)


def test_a_draft_that_leads_nowhere_is_no_end() -> None:
    """What is drafted but not said must not matter."""
    forked = follower("forked", 'start: "ab" ("cé" | "dx")', prompt(1, 9), 9, logit_bias=((5, 50.0),))
    drafter = ScriptedDrafter(tiny_lane().drafter, {forked.row_id: (*forked.tokens, 2, 3, 4, 0, 0)}, 7)
    for width in (1, 8):
        said = play(grammar_lane(), forked, width=width, drafter=drafter)
        assert spelled(said["forked"]) == "abdx"


def test_a_target_without_a_vocabulary_takes_no_grammar() -> None:
    target = tiny_lane().target.with_network(lambda network: network)
    target.grammars = None
    with opened(replace(tiny_lane(), target=target), FREE) as window:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            window.admit(OBJECT)
        assert tokens_of(finish(window)) == expected([FREE])


def test_rows_play_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Future[Constraint]()
    slow = replace(OBJECT, row_id=RowId("slow"))

    def compiled(request: RowRequest, *arguments: Any) -> Future[Constraint] | None:
        return late if request is slow else compile_constraint(request, *arguments)

    monkeypatch.setattr(window_module, "compile_constraint", compiled)
    with opened(grammar_lane(), slow, FREE, PHRASE) as window:
        reports: list[RoundReport] = []
        while not (any(p.finish for r in reports for p in r.rows if p.row_id == "free")):
            reports.append(window.step())
        assert not progress_of(reports, "slow")
        late.set_result(Constraint.of(slow, Grammars(ascii_tokenizer, VOCAB), VOCAB))
        reports += finish(window)
    assert tokens_of(reports) == expected([FREE, PHRASE]) | {"slow": speak(OBJECT).tokens}


# What it costs others


@pytest.mark.parametrize("width", [1, 8])
def test_a_round_with_a_grammar_reads_twice_and_without_once(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[str, Counter[str]] = {}
    for name, rows in {"with": (FREE, HOT_FREE, OBJECT), "without": (FREE, HOT_FREE)}.items():
        with opened(grammar_lane(), *rows, width=width) as window:
            while window.num_live < len(rows):
                window.step()
            with counting_reads(monkeypatch) as reads[name]:
                assert [window.step().width for _ in range(2)] == [width, width]
    assert reads["without"].total() == 2, reads
    assert reads["with"].total() == (2 if width == 1 else 4), reads  # nothing is drafted at width 1


def test_a_grammar_that_takes_its_time_drafts_less_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_module, "PATIENCE_S", 0.0)
    with opened(grammar_lane(), *ALL, width=8, drafter=knowing(ALL, 7)) as window:
        reports = finish(window)
    assert tokens_of(reports) == expected(ALL)
    assert max(p.accepted for p in progress_of(reports, "object")[:-1]) == 0  # the end needs no walk
    assert max(p.accepted for p in progress_of(reports, "free")) == 7


def test_a_window_without_grammars_has_no_masks() -> None:
    with opened(grammar_lane(), FREE, HOT_FREE) as window:
        window.step()
        assert not window.plan().block.sampling.variant.is_masked
        assert "masks" not in window.plan().block.sampling.as_lists()


def test_a_row_beside_them_keeps_its_numbers_bit_for_bit() -> None:
    logits = mx.array(np.random.default_rng(3).normal(size=(2, 3, VOCAB + 5)), dtype=mx.float32)
    places = unconstrained(2, 3, VOCAB + 5)
    places[1, 2] = 0
    places[1, 2, 4] = 1 << 2
    after = np.array(allowed_only(logits, mx.array(places.view(np.uint32))))
    assert (after[0] == np.array(logits)[0]).all()
    assert (after[1, :2] == np.array(logits)[1, :2]).all()
    assert np.flatnonzero(np.isfinite(after[1, 2])).tolist() == [4 * 32 + 2]


def test_log_probabilities_stay_raw() -> None:
    scored = replace(OBJECT, num_top_logprobs=0)
    with opened(grammar_lane(), scored, FREE, width=8, drafter=knowing([scored, FREE], often)) as window:
        told = [n for p in progress_of(finish(window), "object") for n in p.logprobs]
    spoken = speak(OBJECT)
    wanted = [raw[token] for token, raw in zip(spoken.tokens, spoken.logprobs, strict=True)]
    assert np.allclose([n.logprob for n in told], wanted, atol=1e-5)


# The walk


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_place_is_masked_as_if_its_tokens_came_one_by_one(data: st.DataObject) -> None:
    said = speak(HOT_OBJECT).tokens
    at = data.draw(st.integers(0, len(said) - 1))
    right = data.draw(st.integers(0, 7))
    wrong = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=7, max_size=7))
    drafted = [*said[at : at + right], *wrong][:7]
    constraint = Constraint.of(HOT_OBJECT, Grammars(ascii_tokenizer, VOCAB), VOCAB)
    constraint.advance(said[:at])
    places = unconstrained(1, 8, VOCAB)[0]
    constraint.allow(places, drafted)
    history = [*said[:at]]
    for place, token in zip(places, (*drafted, -1), strict=True):
        bits = np.unpackbits(place.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == allowed(JSON, tuple(history))
        if token not in allowed(JSON, tuple(history)) or token in HOT_OBJECT.stop_token_ids:
            break
        history.append(token)
    again = unconstrained(1, 1, VOCAB)[0]
    constraint.allow(again, ())
    assert (again[0] == places[0]).all()  # the walk has left no trace


def test_the_gate_scores_a_row_under_its_grammar() -> None:
    said = speak(OBJECT).tokens
    target = grammar_lane().target
    assert compare(target, OBJECT, said, said).verdict == "equal"
    free = speak(replace(OBJECT, grammar=None, max_tokens=8)).tokens
    found = compare(target, OBJECT, said, free)
    assert (found.verdict, found.gap) == ("different", float("inf"))
