"""Which token each piece of a row's text came from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dflash_core.pair
from dflash_core.text.stream import Piece, TextStream
from dflash_core.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(dflash_core.pair.__file__).parent / "target")
STOPS = ("lo w", "\U0001f642!", "zzz")
TEXTS = st.text(alphabet="hello wrd zé€\U0001f642!", max_size=30)


def say(ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> tuple[str, list[Piece]]:
    """Push ids in stretches, to the end or a stop string."""
    stream = TextStream(TOKENIZER, stops, traces=True)
    text, pieces, at = "", [], 0
    for end in [*sorted(cuts), len(ids)]:
        delta = stream.push(ids[at:end])
        at = end
        text, pieces = text + delta.text, pieces + list(delta.pieces)
        if delta.stopped:
            return text, pieces
    rest = stream.finish()
    return text + rest.text, pieces + list(rest.pieces)


@given(TEXTS, st.data(), st.booleans())
def test_pieces_are_the_text_in_order_and_come_from_tokens_that_hold_them(
    text: str, data: st.DataObject, has_stops: bool
) -> None:
    ids = TOKENIZER.encode(text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    stops = STOPS if has_stops else ()
    said, pieces = say(ids, cuts, stops)
    assert "".join(piece for _, piece in pieces) == said
    assert said == say(ids, [], stops)[0]
    numbers = [number for number, _ in pieces]
    assert numbers == sorted(numbers)
    for number, piece in pieces:
        own = TOKENIZER.token_bytes(ids[number])
        assert piece.encode() in own or piece.encode().endswith(own) or own.endswith(piece[1:].encode())


@given(TEXTS)
def test_tracing_changes_no_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    plain = TextStream(TOKENIZER)
    assert plain.push(ids).text + plain.finish().text == say(ids, [])[0]


def test_a_character_in_parts_belongs_to_the_token_that_ends_it() -> None:
    ids = TOKENIZER.encode("\U0001f642")
    assert len(ids) > 1, "the pair spells this in parts"
    assert say(ids, list(range(len(ids))))[1] == [(len(ids) - 1, "\U0001f642")]


def test_bytes_that_never_became_a_character_belong_to_the_last_token() -> None:
    ids = [*TOKENIZER.encode("a"), TOKENIZER.encode("\U0001f642")[0]]
    assert say(ids, [])[1] == [(0, "a"), (1, "\ufffd")]


@pytest.mark.parametrize(("stops", "expected"), [((), "x hello"), (("hello",), "x ")])
def test_text_held_for_a_stop_string_comes_later_from_its_own_token(
    stops: tuple[str, ...], expected: str
) -> None:
    ids = TOKENIZER.encode("x") + TOKENIZER.encode(" ") + TOKENIZER.encode("he") + TOKENIZER.encode("llo")
    said, pieces = say(ids, [1, 2, 3], stops)
    assert said == expected
    assert [number for number, _ in pieces] == sorted(number for number, _ in pieces)


def test_without_tracing_there_are_no_pieces() -> None:
    assert TextStream(TOKENIZER).push(TOKENIZER.encode("hello")).pieces == ()
