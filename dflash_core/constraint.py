"""What a grammar allows a window's rows to say: bits for every place of a block, made on the host.

A round with such a row needs the drafted tokens on the host before the verify chooses: one blocking read
more. Its masks reach the device as one array. Whatever goes wrong here ends the row that it belongs to.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from dflash_core.errors import InvalidRequest
from dflash_core.request import RowRequest
from dflash_core.target import BlockInput
from dflash_core.text.grammar import Grammars, Matcher

if TYPE_CHECKING:
    from dflash_core.row import Row

PATIENCE_S = 0.02  # for one row in one round; a grammar that takes longer goes on with fewer drafts


@dataclass(slots=True)
class Constraint:
    """One row's grammar, with the least length that it has to keep."""

    matcher: Matcher
    stops: np.ndarray  # [ceil(V / 32)] int32, bits of the row's stop tokens
    num_early: int  # tokens still to say before one of them may come

    @classmethod
    def of(cls, request: RowRequest, grammars: Grammars, vocab_size: int) -> "Constraint":
        """Raises InvalidRequest where the grammar is wrong, RowFailed where it does not fit what was said."""
        assert request.grammar is not None
        said = () if request.prompt_length is None else request.tokens[request.prompt_length :]
        early = max(0, request.sampling.min_tokens - len(said))
        stops = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
        stops[list(request.stop_token_ids)] = 1
        words = np.packbits(stops, bitorder="little").view(np.int32)
        return cls(grammars.matcher(request.grammar, said), words, early)

    def allow(self, places: np.ndarray, drafted: Sequence[int]) -> int:
        """Write bits for ``places`` [K, ceil(V / 32)] of a block with inputs ``drafted`` after the anchor.

        Returns how many of the places may be used. A least length bars the stop tokens as long as the
        grammar leaves anything else.
        """
        num_usable = self.matcher.allow(places, drafted, PATIENCE_S)
        for place in places[: self.num_early]:
            others = place & ~self.stops
            if others.any():
                place[:] = others
        return num_usable

    def advance(self, tokens: Sequence[int]) -> None:
        """Take what the row has committed."""
        self.matcher.advance(tokens)
        self.num_early = max(0, self.num_early - len(tokens))


def allowed_next(request: RowRequest, grammars: Grammars, vocab_size: int) -> np.ndarray:
    """Bits [1, 1, ceil(V / 32)] int32 of what a row may say next, by itself."""
    places = unconstrained(1, 1, vocab_size)
    Constraint.of(request, grammars, vocab_size).allow(places[0], ())
    return places


def unconstrained(num_rows: int, width: int, vocab_size: int) -> np.ndarray:
    """Bits [B, K, ceil(V / 32)] int32 by which every token may come."""
    return np.full((num_rows, width, num_words(vocab_size)), -1, dtype=np.int32)


def num_words(vocab_size: int) -> int:
    """Length of a place's bits."""
    return -(-vocab_size // 32)


def compile_constraint(
    request: RowRequest, grammars: Grammars | None, vocab_size: int
) -> "Future[Constraint] | None":
    """Begin to compile a row's grammar, on a thread of its own: other rows play on meanwhile."""
    if request.grammar is None:
        return None
    if grammars is None:
        raise InvalidRequest("this target has no tokenizer, so it can follow no grammar", param="grammar")
    return _compiling().submit(Constraint.of, request, grammars, vocab_size)


@cache
def _compiling() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")


def constrain(
    rows: "Sequence[Row | None]", block: BlockInput, drafts: mx.array, vocab_size: int
) -> BlockInput:
    """The block with what its rows' grammars allow after ``drafts`` [B, K - 1]; as it is if none has one."""
    if not block.sampling.variant.is_masked:
        return block
    drafted = np.array(drafts) if drafts.shape[1] else np.zeros(drafts.shape, dtype=np.int32)
    places = unconstrained(len(rows), drafted.shape[1] + 1, vocab_size)
    budgets = block.budgets.copy()
    for slot, row in enumerate(rows):
        if row is not None:
            num_usable = row.constrain(places[slot], drafted[slot].tolist())
            budgets[slot] = min(budgets[slot], num_usable)  # in this round the row keeps no more
    return replace(block, budgets=budgets, sampling=block.sampling.masked(places))
