import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dflash_core
from dflash_core.text import StopMatcher, TextStream, Tokenizer

TOKENIZER = Tokenizer.load(Path(str(dflash_core.__file__)).parent / "pair" / "target")

LETTERS = st.text("ab", max_size=25)
STOPS = st.lists(st.text("ab", min_size=1, max_size=8), max_size=4)
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of those, in the whole text."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def match(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    said = ""
    for piece in pieces:
        progress = matcher.feed(piece)
        said += progress.text
        if progress.stop is not None:
            return said, progress.stop
    return said + matcher.finish(), None


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces: list[str] = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@given(LETTERS, STOPS, CUTS)
@example("aabaab", ["aaba", "ab"], [1])
@example("abcd", ["abcd", "bc"], [4])
@settings(max_examples=400, deadline=None)
def test_however_text_is_cut_the_stop_is_that_of_the_whole(text: str, stops: list[str], sizes: list[int]):
    assert match(cut(text, sizes), stops) == reference(text, stops)


@given(LETTERS, STOPS, CUTS)
@settings(max_examples=200, deadline=None)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str], sizes: list[int]):
    matcher = StopMatcher(stops)
    said = fed = ""
    for piece in cut(text, sizes):
        progress = matcher.feed(piece)
        fed, said = fed + piece, said + progress.text
        if progress.stop is not None:
            return
        held = fed[len(said) :]
        beginnings = {stop[:i] for stop in stops for i in range(1, len(stop))}
        assert said + held == fed
        assert held == max((b for b in beginnings if fed.endswith(b)), key=len, default="")


def test_text_is_held_back_until_it_cannot_be_a_stop_string():
    matcher = StopMatcher(["\n\nHuman:"])
    assert matcher.feed("hi\n").text == "hi"
    assert matcher.feed("\n").text == ""
    assert matcher.feed("Hum").text == ""
    assert matcher.feed("ble").text == "\n\nHumble"
    assert matcher.feed("\n").text == ""
    assert matcher.finish() == "\n"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_repetitive_text_and_stop_string_take_time_in_proportion():
    matcher = StopMatcher(["a" * 5000 + "b"])
    started = time.monotonic()
    for _ in range(20_000):
        matcher.feed("aaaa")
    assert time.monotonic() - started < 5


@given(
    st.text("ab 日🦜", max_size=20),
    st.lists(st.text("ab 日🦜", min_size=1, max_size=4), max_size=3),
    CUTS,
)
@settings(max_examples=200, deadline=None)
def test_a_stream_stops_where_the_whole_text_does_and_counts_the_tokens_up_to_there(
    text: str, stops: list[str], sizes: list[int]
):
    ids = TOKENIZER.encode(text, parse_special=False)
    stream = TextStream(TOKENIZER, stops)
    said, used, start = "", 0, 0
    while start < len(ids):
        size = sizes[start % len(sizes)]
        delta = stream.push(ids[start : start + size])
        said, used, start = said + delta.text, used + delta.num_tokens_used, start + size
        if delta.stopped:
            break
    said += stream.finish().text

    expected, stop = reference(text, stops)
    assert said == expected
    if stop is None:
        assert used == len(ids)
    else:
        assert stop in TOKENIZER.decode(ids[:used])
        assert not any(s in TOKENIZER.decode(ids[: used - 1]) for s in stops)


def test_a_stop_string_inside_a_block_cuts_text_and_tokens():
    ids = TOKENIZER.encode("one\ntwo\nthree\n")
    delta = TextStream(TOKENIZER, ["two"]).push(ids)
    assert (delta.text, delta.stopped, delta.stop) == ("one\n", True, "two")
    assert TOKENIZER.decode(ids[: delta.num_tokens_used]).endswith("two")


def test_a_stopped_stream_says_nothing_more():
    stream = TextStream(TOKENIZER, ["two"])
    stream.push(TOKENIZER.encode("one two"))
    later = stream.push(TOKENIZER.encode("three"))
    assert (later.text, later.num_tokens_used, later.stopped) == ("", 0, True)
    assert (stream.finish().text, stream.finish().stopped) == ("", True)


@pytest.mark.parametrize("stops", [[], ["unseen"]])
def test_a_stop_token_counts_but_has_no_text_even_if_it_is_an_ordinary_word(stops: list[str]):
    ids = TOKENIZER.encode("yes or no")
    stream = TextStream(TOKENIZER, stops)
    delta = stream.push(ids, is_last_stop=True)
    said = delta.text + stream.finish().text
    assert said == TOKENIZER.decode(ids[:-1])
    assert delta.num_tokens_used == len(ids)
    assert not delta.stopped


def test_a_stop_string_before_a_stop_token_wins():
    ids = TOKENIZER.encode("one two three")
    delta = TextStream(TOKENIZER, ["two"]).push([*ids, 2], is_last_stop=True)
    assert delta.stopped
    assert delta.num_tokens_used < len(ids)


def test_finish_hands_out_what_was_held_back():
    stream = TextStream(TOKENIZER, ["no more"])
    assert stream.push(TOKENIZER.encode("there is no")).text == "there is "
    assert stream.finish().text == "no"


def test_a_stop_string_waits_for_the_least_length() -> None:
    ids = TOKENIZER.encode("one two three two four")
    early = [TOKENIZER.decode(ids[: i + 1]) for i in range(len(ids))].index("one two") + 1
    assert TextStream(TOKENIZER, ["two"]).push(ids).text == "one "
    stream = TextStream(TOKENIZER, ["two"], min_tokens=early)
    deltas = [stream.push([token]) for token in ids[:-1]]
    assert "".join(delta.text for delta in deltas) == "one two three "
    assert deltas[-1].stop == "two"


def test_no_part_of_a_stop_string_may_come_before_the_least_length() -> None:
    ids = TOKENIZER.encode("stop and go")
    stream = TextStream(TOKENIZER, ["stop and"], min_tokens=1)
    assert (stream.push(ids).text + stream.finish().text) == "stop and go"
