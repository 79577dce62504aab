"""What enters the engine. Parsed once at the edge; an invalid request has no way to become one of these."""

from dataclasses import dataclass, field
from typing import NewType

RowId = NewType("RowId", str)
WindowId = NewType("WindowId", str)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen. ``temperature`` 0 is greedy; the rest is then without effect."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # any 64-bit value; one is drawn at admission if the client gave none


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row to play: a fresh request, or one continued elsewhere with what it had committed.

    ``tokens`` is the prompt followed by tokens already committed (none at first); the row's next
    token has absolute position ``len(tokens)``.
    """

    row_id: RowId
    tokens: tuple[int, ...]  # at least one
    max_tokens: int  # tokens still to emit, at least one
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()  # emitting one ends the row; it is emitted too
    prompt_length: int | None = None  # where the prompt ends in ``tokens``; None: all of it
