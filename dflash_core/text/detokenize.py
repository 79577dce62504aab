"""Token ids to text, incrementally: each id is looked at a bounded number of times.

Text is handed out as soon as later ids cannot change it; an unfinished UTF-8 sequence is held back.
Byte-level vocabularies (Qwen's, and nearly all of today's) are exact for every sequence of ids: the
pieces together are what ``Tokenizer.decode`` gives. Others are decoded through a short window, exact as
long as the ids spell valid UTF-8.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from dflash_core.text.token_bytes import token_bytes
from dflash_core.text.tokenizer import Tokenizer

_MOST_UNFINISHED = 3  # bytes of a character that lacks its last
_MAX_HELD_IDS = 16  # no character has more bytes; beyond it the ids are garbage and are not waited for


class Detokenizer(Protocol):
    """One row's text. Fed with committed ids, any number at once."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character are U+FFFD."""
        ...


def detokenizer_for(tokenizer: Tokenizer, *, skip_special: bool = True) -> Detokenizer:
    """Return a fresh detokeniser that fits the vocabulary."""
    kind = _ByteLevelDetokenizer if tokenizer.is_byte_level else _WindowDetokenizer
    return kind(tokenizer, skip_special)


class _ByteLevelDetokenizer:
    """Every token is some bytes, whatever stands around it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, ids: Sequence[int]) -> str:
        token = self._tokenizer.token
        pieces = (token_bytes(token(i), is_byte_level=True) for i in ids if i not in self._skipped)
        return self._utf8.decode(b"".join(pieces))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes new ids together with the last ones before them, and hands out the difference.

    The ids before give the context that SentencePiece-like decoders need: a leading space is dropped
    from the first word only, and byte tokens join into a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []  # the text of these is out
        self._held: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        skipped = self._tokenizer.special_ids if self._skip_special else ()
        self._held += (i for i in ids if i not in skipped)
        # One unfinished character spoils its whole run of byte tokens, so the last few may have to wait.
        for num_waiting in range(min(_MOST_UNFINISHED, len(self._held)) + 1):
            text = self._text_of(len(self._held) - num_waiting)
            if not text.endswith("\ufffd"):
                return self._hand_out(text, len(self._held) - num_waiting)
        if len(self._held) <= _MAX_HELD_IDS:
            return ""
        return self._hand_out(self._text_of(len(self._held)), len(self._held))

    def finish(self) -> str:
        return self._hand_out(self._text_of(len(self._held)), len(self._held))

    def _hand_out(self, text: str, num_ids: int) -> str:
        if text:
            self._context, self._held = self._held[:num_ids], self._held[num_ids:]
        return text

    def _text_of(self, num_ids: int) -> str:
        """The text that the first held ids add to what is out."""
        before = self._decode(self._context)
        return self._decode(self._context + self._held[:num_ids])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
