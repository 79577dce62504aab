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

from dflash_core.errors import InvalidRequest, RowFailed
from dflash_core.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_KEPT = 64  # compiled grammars; a row takes a copy, which costs next to nothing
# The library counts work, not seconds: what compiles takes seconds at most, a place's bits some 15 ms.
_LIMITS = LLParserLimits(verbose_errors=False)


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

    def prepare(self) -> None:
        """Read the vocabulary now; that of a large model takes about a second. Raises CheckpointError."""
        with self._lock:
            self._read_vocabulary()

    def matcher(self, grammar: str, said: Sequence[int] = ()) -> "Matcher":
        """A place in ``grammar``, after the tokens ``said``.

        Raises InvalidRequest where the grammar is wrong or too large, RowFailed where it does not allow them.
        """
        with self._lock:
            matcher = Matcher(self._compiled(grammar).deep_copy())
        matcher.advance(said)
        return matcher

    def _compiled(self, grammar: str) -> LLMatcher:
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"the grammar exceeds {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        compiled = LLMatcher(self._read_vocabulary(), grammar, log_level=0, limits=_LIMITS)
        first = b"" if compiled.is_error() else compiled.compute_bitmask()
        if compiled.is_error():
            raise InvalidRequest(compiled.get_error().strip(), param="grammar")
        if not any(first):
            raise InvalidRequest("nothing that can be said fits the grammar", param="grammar")
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

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def allow(self, places: np.ndarray, drafted: Sequence[int], patience_s: float = float("inf")) -> int:
        """Write which tokens may come at each place of a block: ``places`` [K, ceil(V / 32)] int32, as bits.

        The place after draft j sees drafts 1..j as said. After a draft that the grammar does not allow, and
        after the end, nothing is written: no such place can be reached. Returns how many places may be
        used: K, or fewer where the walk took longer than ``patience_s``.
        """
        until = time.perf_counter() + patience_s
        num_walked, num_usable = 0, len(places)
        for place, token in zip(places, (*drafted, None), strict=True):
            self._matcher.unsafe_compute_mask_ptr(place.ctypes.data, place.nbytes)
            if token is None or self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                break
            num_walked += 1
            if time.perf_counter() > until:
                num_usable = num_walked
                break
        if num_walked:
            self._matcher.rollback(num_walked)
        self._check()
        return num_usable

    def advance(self, tokens: Sequence[int]) -> None:
        """Take what a row has committed."""
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            self._check()
            raise RowFailed("the grammar does not allow what was said")
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RowFailed(f"the grammar cannot be followed: {self._matcher.get_error().strip()}")
