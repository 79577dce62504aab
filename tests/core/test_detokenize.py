import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import dflash_core
from dflash_core.text import Tokenizer, detokenizer_for
from dflash_core.text.token_bytes import token_bytes

PAIR = Path(str(dflash_core.__file__)).parent / "pair" / "target"
TOKENIZER = Tokenizer.load(PAIR)

TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(["👩‍👩‍👧", "🇳🇴", "日本語", "e\u0301", "של", " ", "\n\n", "word", "<|im_end|>", "\ufffd"]),
    max_size=12,
).map("".join)
RANDOM_IDS = st.lists(st.integers(0, 8300), max_size=40)  # the model's output may be wider than 8192
VOCABULARY = json.loads((PAIR / "tokenizer.json").read_text())["model"]["vocab"]
BYTE_IDS = st.lists(st.sampled_from([i for token, i in VOCABULARY.items() if len(token) == 1]), max_size=16)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks: list[list[int]] = []
    while ids:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip_special: bool = True) -> list[str]:
    detokenizer = detokenizer_for(tokenizer, skip_special=skip_special)
    return [*(detokenizer.add(chunk) for chunk in chunks), detokenizer.finish()]


@given(TEXTS.map(TOKENIZER.encode) | RANDOM_IDS | BYTE_IDS, CUTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_pieces_together_are_the_whole_decoded(ids: list[int], sizes: list[int], skip_special: bool):
    pieces = stream(TOKENIZER, cut(ids, sizes), skip_special)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special=skip_special)


@given(st.text(max_size=30).map(TOKENIZER.encode))
@settings(max_examples=100, deadline=None)
def test_text_once_out_is_a_prefix_of_what_follows(ids: list[int]):
    whole, said = TOKENIZER.decode(ids), ""
    for piece in stream(TOKENIZER, [[i] for i in ids]):
        said += piece
        assert whole.startswith(said)


def test_an_unfinished_character_is_held_back_and_ends_as_a_replacement():
    ids = TOKENIZER.encode("🦜", parse_special=False)
    assert len(ids) > 1
    detokenizer = detokenizer_for(TOKENIZER)
    assert detokenizer.add(ids[:-1]) == ""
    assert detokenizer.add(ids[-1:]) == "🦜"
    assert detokenizer.add(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_have_no_text_unless_asked_for():
    ids = TOKENIZER.encode("<|im_start|>a<think><|im_end|>")
    assert "".join(stream(TOKENIZER, [ids])) == "a<think>"
    assert "".join(stream(TOKENIZER, [ids], skip_special=False)) == "<|im_start|>a<think><|im_end|>"


def test_an_added_token_reads_as_it_is_spelt(tmp_path: Path):
    backend = Backend.from_file(str(PAIR / "tokenizer.json"))
    backend.add_tokens(["日本 x"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a日本 xb")
    assert len(ids) == 3
    assert "".join(stream(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids) == "a日本 xb"


def test_a_long_row_takes_time_in_proportion():
    ids = TOKENIZER.encode("a few words and 日本語 🦜 ") * 4000
    started = time.monotonic()
    stream(TOKENIZER, [[i] for i in ids])
    assert time.monotonic() - started < 5


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of the other kind: word borders as ▁, bytes for what it lacks, first space dropped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé日"]
    backend = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@given(st.text("abcde é日🦜本\n"), CUTS)
@settings(max_examples=100, deadline=None)
def test_a_sentencepiece_vocabulary_streams_what_it_decodes(
    sentencepiece: Tokenizer, text: str, sizes: list[int]
):
    ids = sentencepiece.encode(text)
    assert "".join(stream(sentencepiece, cut(ids, sizes))) == sentencepiece.decode(ids)


def test_a_sentencepiece_row_of_broken_bytes_is_not_held_back_for_ever(sentencepiece: Tokenizer):
    broken = [1 + 0xE4] * 100
    pieces = stream(sentencepiece, [[i] for i in broken])
    assert "".join(pieces) == "\ufffd" * 100
    assert any(pieces[:20])


def test_a_cut_character_does_not_spoil_the_run_of_bytes_before_it(sentencepiece: Tokenizer):
    text = "aa本本本本🦜"
    ids = sentencepiece.encode(text)
    for size in range(1, len(ids)):
        assert "".join(stream(sentencepiece, [ids[:size], ids[size:]])) == text


def test_tokens_one_by_one_have_the_bytes_of_the_whole_text() -> None:
    text = "Grüße \U0001f600 to <|im_start|>user\n\u2082"
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()
    assert TOKENIZER.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("token", "data"), [("<0xE2>", b"\xe2"), ("\u2581the", b" the"), ("<0xE>", b"<0xE>"), (None, b"")]
)
def test_tokens_of_other_vocabularies_spell_spaces_and_bytes(token: str | None, data: bytes) -> None:
    assert token_bytes(token, is_byte_level=False) == data
