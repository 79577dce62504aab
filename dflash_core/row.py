"""A request inside a window, and what it still has to say."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from dflash_core.constraint import Constraint
from dflash_core.errors import DFlashError, InvalidRequest, RowFailed
from dflash_core.events import FinishReason
from dflash_core.processors import SampledRow
from dflash_core.request import RowId, RowRequest

logger = logging.getLogger("dflash.engine")

T = TypeVar("T")


@dataclass(slots=True)
class Row:
    """One row's host state. ``anchor`` is its newest token, not yet run through the target."""

    request: RowRequest
    compiling: "Future[Constraint] | None" = None  # its grammar; it cannot start before that is done
    anchor: int = field(init=False)
    budget: int = field(init=False)  # tokens it may still emit
    emitted: list[int] = field(init=False, default_factory=list[int])  # here; what came before is in tokens
    failure: DFlashError | None = field(init=False, default=None)  # what ends this row and no other

    def __post_init__(self) -> None:
        self.anchor = self.request.tokens[-1]
        self.budget = self.request.max_tokens

    @property
    def row_id(self) -> RowId:
        """Its name."""
        return self.request.row_id

    @property
    def prompt_length(self) -> int:
        """Where its prompt ends."""
        at = self.request.prompt_length
        return len(self.request.tokens) if at is None else at

    def sampled(self) -> SampledRow:
        """What choosing its next tokens needs to know."""
        request, at = self.request, self.prompt_length
        output = (*request.tokens[at:], *self.emitted)
        return SampledRow(
            request.sampling,
            request.tokens[:at],
            output,
            request.stop_token_ids,
            request.num_top_logprobs,
            has_grammar=request.grammar is not None,
        )

    @property
    def is_ready(self) -> bool:
        """Whether it can start."""
        return self.compiling is None or self.compiling.done()

    def constrain(self, places: np.ndarray, drafted: Sequence[int]) -> int:
        """Write what its grammar, if any, allows at ``places`` [K, ceil(V / 32)] after ``drafted``.

        Returns how many of the places may be used.
        """
        num_usable = self._follow(lambda constraint: constraint.allow(places, drafted))
        return len(places) if num_usable is None else num_usable

    def _follow(self, work: Callable[[Constraint], T]) -> T | None:
        """Do something with its grammar. Nothing that goes wrong there reaches another row."""
        if self.compiling is None or self.failure is not None:
            return None
        try:
            return work(self.compiling.result())
        except (InvalidRequest, RowFailed) as error:
            self.failure = error
        except Exception:  # a library of somebody else's, or a file: its words are not for clients
            logger.exception("row %s cannot follow its grammar", self.row_id)
            self.failure = RowFailed("the grammar cannot be followed")
        return None

    def commit(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Take a round's tokens; returns those it emits (cut after a stop token) and why it ends, if so."""
        emitted, reason = cut(tokens, self.budget, self.request.stop_token_ids)
        self.budget -= len(emitted)
        self.emitted += emitted
        self.anchor = emitted[-1]
        if reason is None:
            self._follow(lambda constraint: constraint.advance(emitted))
        return emitted, reason


def cut(
    tokens: tuple[int, ...], budget: int, stop_token_ids: frozenset[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The prefix of ``tokens`` that a row may emit: up to its budget, through its first stop token."""
    for i, token in enumerate(tokens[:budget]):
        if token in stop_token_ids:
            return tokens[: i + 1], "stop"
    return tokens[:budget], ("length" if len(tokens) >= budget else None)
