"""Grammars for answers, and a row's place in one. Stands on llguidance alone.

A grammar is plain text in llguidance's own form: Lark, or the JSON that bundles several; schemas and
regular expressions are written in it by whoever parses requests. A ``Matcher`` walks a row's tokens and
tells which may come next, as bits. A model's end tokens may come exactly where the grammar may end; other
control tokens only where it names them.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_core.errors import DFlashError, InvalidRequest, RowFailed
from dflash_core.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_TOLD = 500  # characters of an error
_MAX_KEPT = 64  # compiled grammars; a row takes a copy, which costs next to nothing
# The library counts work, not seconds: what compiles takes seconds at most, a place's bits some 15 ms.
# A state of a lexer takes 1 to 2 KB, and each row has its own: a hostile expression stays under 100 MB.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class Vocabulary(Protocol):
    """The part of a ``Tokenizer`` that grammars need."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    def as_json(self) -> str:
        """The tokenizer as its file has it."""
        ...


class Grammars:
    """Compiles grammars for one vocabulary. May be used from several threads."""

    def __init__(self, open_tokenizer: Callable[[], Vocabulary], vocab_size: int | None = None):
        self._open_tokenizer = open_tokenizer  # called at the first grammar
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of_checkpoint(cls, path: Path, vocab_size: int) -> "Grammars":
        """For a target, whose logits may be wider than its tokenizer's vocabulary."""
        return cls(lambda: Tokenizer.load(path), vocab_size)

    def prepare(self) -> bool:
        """Read the vocabulary now, which takes about a second for a large model; whether there is one."""
        try:
            with self._lock:
                self._read_vocabulary()
        except DFlashError:  # no tokenizer, or no end: a row that wants a grammar will be told
            return False
        return True

    def matcher(self, grammar: str, said: Sequence[int] = ()) -> "Matcher":
        """A place in ``grammar``, after the tokens ``said``.

        Raises InvalidRequest where the grammar is wrong or too large, RowFailed where it does not allow them.
        """
        with self._lock:
            matcher = Matcher(self._compiled(grammar))
        matcher.advance(said)
        return matcher

    def _compiled(self, grammar: str) -> LLMatcher:
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"the grammar exceeds {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        compiled = LLMatcher(self._read_vocabulary(), grammar, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise InvalidRequest(_told(compiled), param="grammar")
        compiled.compute_bitmask()
        if compiled.is_error():
            raise InvalidRequest(f"nothing that can be said fits: {_told(compiled)}", param="grammar")
        self._kept[grammar] = compiled
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            tokenizer = self._open_tokenizer()
            if not tokenizer.eos_token_ids:
                raise InvalidRequest("the model has no end token, so no grammar could end", param="grammar")
            self._vocabulary = LLTokenizer(
                tokenizer.as_json(),
                n_vocab=self._vocab_size or tokenizer.vocab_size,
                eos_token=sorted(tokenizer.eos_token_ids),
            )
        return self._vocabulary


class Matcher:
    """One row's place in its grammar. Every method raises RowFailed where the grammar cannot go on."""

    def __init__(self, compiled: LLMatcher):
        self._compiled = compiled  # nobody walks this one
        self._matcher = compiled.deep_copy()
        self._said: list[int] = []

    def allow(self, places: np.ndarray, drafted: Sequence[int], patience_s: float = float("inf")) -> int:
        """Write which tokens may come at each place of a block: ``places`` [K, ceil(V / 32)] int32, as bits.

        The place after draft j sees drafts 1..j as said. After a draft that the grammar does not allow, and
        after the end, nothing is written: no such place can be reached. Returns how many places may be
        used: K, or fewer where the walk took longer than ``patience_s`` or led to where nothing can be said.
        """
        until = time.perf_counter() + patience_s
        num_walked, num_usable = 0, len(places)
        for place, token in zip(places, (*drafted, None), strict=True):
            self._matcher.unsafe_compute_mask_ptr(place.ctypes.data, place.nbytes)
            if self._matcher.is_error():
                num_usable = num_walked
                break
            if token is None or self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                break
            num_walked += 1
            if time.perf_counter() > until:
                num_usable = num_walked
                break
        self._return_from(num_walked)
        return num_usable

    def advance(self, tokens: Sequence[int]) -> None:
        """Take what a row has committed."""
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise RowFailed(f"the grammar does not allow what was said: {_told(self._matcher)}")
        self._said += tokens

    def _return_from(self, num_walked: int) -> None:
        """Forget drafts.

        A walk into an error, from which no matcher returns, is no row's end: the row may say something else
        than what was drafted. It is if not even the first place can be had.
        """
        if num_walked and self._matcher.is_error():
            self._matcher = self._compiled.deep_copy()
            self._matcher.consume_tokens(self._said)
        elif num_walked:
            self._matcher.rollback(num_walked)
        if self._matcher.is_error():
            raise RowFailed(f"the grammar cannot be followed: {_told(self._matcher)}")


def _told(matcher: LLMatcher) -> str:
    """What is wrong, on a line: the library draws arrows below what it quotes."""
    line = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_TOLD else line[:_MAX_TOLD] + "..."
