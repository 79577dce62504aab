"""What leaves the engine: per round, what each row committed. Numbers only, no arrays."""

from dataclasses import dataclass, field
from typing import Literal

from dflash_core.request import RowId, WindowId

FinishReason = Literal["stop", "length", "error"]
ROUND_PHASES = ("draft", "verify", "commit")  # of a round, in order; a step may prefill before it


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was to the target itself, before any processor, and what else was."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, as many as asked for, likeliest first


@dataclass(frozen=True, slots=True)
class RowProgress:
    """One row in one round. ``tokens`` are the accepted drafts and the bonus, after budget and stop."""

    row_id: RowId
    tokens: tuple[int, ...]
    drafted: int
    walked: int  # leading drafts that equal the target's own choice
    accepted: int  # drafts kept by the policy (bonus not counted)
    finish: FinishReason | None = None
    error: str | None = None  # only with finish == "error": a sentence for the client
    error_kind: str | None = None  # only with finish == "error": a kind of dflash_core.errors
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of ``tokens``, if the row asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token: of the prompt's second and on
    num_first: int = 0  # leading ``tokens`` that reading the prompt gave, before any round
    cached_tokens: int = 0  # once: of a fresh row's prompt, those that a saved state stood for

    def accepted_of(self, num_used: int) -> int:
        """How many accepted drafts are among the first tokens, where a stop string cut what follows."""
        return min(self.accepted, max(0, num_used - self.num_first))


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """What rows that began to be read found saved."""

    queried: int  # their tokens
    found: int  # of them, those that need not be read
    num_bytes: int  # held by the target now


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One step of a window: at most one prefill chunk and one round."""

    window_id: WindowId
    round_index: int  # rounds played by this window, this one included
    width: int  # block width K; 0 when the step only prefilled
    rows: tuple[RowProgress, ...]  # the round's first, [:live_rows]; then first tokens that stand alone
    live_rows: int  # rows in the round
    prefilling_rows: int  # rows not yet in a round
    prefilled_tokens: int = 0  # prompt tokens run in this step
    seconds: dict[str, float] = field(default_factory=dict)  # by phase: prefill, draft, verify, commit
    prefixes: PrefixCounts | None = None  # None where prefixes are not reused
