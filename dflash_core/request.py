"""What enters the engine. Parsed once at the edge; an invalid request has no way to become one of these."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import NewType

RowId = NewType("RowId", str)
WindowId = NewType("WindowId", str)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen.

    ``temperature`` 0 is greedy: truncations and seed are then without effect. Biases and penalties act
    before all that; what they look back at is the row's own.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # any 64-bit value; one is drawn at admission if the client gave none
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    repetition_penalty: float = 1.0  # above 0; 1: off; over prompt and output, by the logit's sign
    presence_penalty: float = 0.0  # 0: off; once for every token that the row has emitted
    frequency_penalty: float = 0.0  # 0: off; for each time that it has
    min_tokens: int = 0  # stop tokens are barred until the row has emitted so many

    def for_choice(self, index: int) -> "Sampling":
        """The settings of one of several rows for a request: the first has its seed, others one of theirs."""
        if index == 0:
            return self
        words = f"{self.seed & (2**64 - 1)}:{index}".encode()
        seed = int.from_bytes(hashlib.sha256(words).digest()[:8], "little")
        return replace(self, seed=seed)


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
    num_top_logprobs: int | None = None  # likeliest tokens to report with each; None: no log-probabilities
    wants_prompt_logprobs: bool = False  # those of the prompt too, as many
    save_at: tuple[int, ...] = ()  # lengths of ``tokens`` at which to save the state, if prefixes are reused
    grammar: str | None = None  # what the answer must be, in llguidance's own form; see text/grammar.py
