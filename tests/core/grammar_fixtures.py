"""A tokenizer for tiny lanes: printable ASCII, some longer tokens, two that end; other ids mean nothing."""

import string
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from dflash_core.loading import LoadedLane
from dflash_core.request import RowRequest
from dflash_core.text.grammar import Grammars
from dflash_core.text.template import ChatTemplate
from dflash_core.text.tokenizer import Tokenizer
from tests.core.engine_fixtures import VOCAB, row, tiny_lane

END, OTHER_END = 0, 1
LONGER = ("true", "false", "null", '":', '{"', "[[", "]]", "}}", ", ", "00")


@cache
def ascii_tokenizer() -> Tokenizer:
    """Byte-level, ``VOCAB`` ids or fewer."""
    words = ["<end>", "<other end>", *string.ascii_letters, *string.digits, *string.punctuation, "Ġ", "Ċ"]
    words += [text.replace(" ", "Ġ") for text in LONGER]
    assert len(words) <= VOCAB
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    return Tokenizer(backend, ChatTemplate({}, {}), frozenset({END, OTHER_END}))


@cache
def grammar_lane() -> LoadedLane:
    """``tiny_lane`` with a vocabulary; its logits are wider than that."""
    target = tiny_lane().target.with_network(lambda network: network)
    target.grammars = Grammars(ascii_tokenizer, VOCAB)
    return replace(tiny_lane(), target=target)


def follower(name: str, grammar: str, tokens: Sequence[int], max_tokens: int, **sampling: Any) -> RowRequest:
    """A row with a grammar; keyword arguments are its sampling."""
    request = row(name, tokens, max_tokens, stop=(END, OTHER_END), **sampling)
    return replace(request, grammar=grammar)


def spelled(tokens: Sequence[int]) -> str:
    """What a row said, without its end token."""
    return ascii_tokenizer().decode(tokens)
