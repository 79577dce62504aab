"""What a request's own wishes do to the target's logits, before temperature and truncation.

In this order: biases (a stop token that may not come yet is one of minus infinity), penalties, and what a
grammar allows, whose bits the host has made (see ``constraint``). All act at every place of a block as
if its tokens came one by one: the place after draft j sees the row's history and drafts 1..j. The
vocabulary's counts are made on the device, when rows come or go; inside a block only the drafted tokens
differ from them, so no [B, K, V] of counts is ever built.

Neutral settings leave a number bit for bit as it was: a row that asks for nothing loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import mlx.core as mx
import numpy as np

from dflash_core.errors import InvalidRequest
from dflash_core.request import RowRequest, Sampling


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row's sampling with what it looks back at."""

    sampling: Sampling
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()  # emitted so far, here or elsewhere
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    num_top: int | None = None  # likeliest tokens to report at each place; None: no log-probabilities
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class Biases:
    """``logit_bias`` and ``min_tokens``."""

    bias: mx.array  # [B, V] float32
    is_barred: mx.array  # [B, V] bool, stop tokens of rows with a least length
    barred_until: mx.array  # [B] int32, absolute position from which they may come

    @staticmethod
    def are_wanted(sampling: Sampling) -> bool:
        """Whether a row has any."""
        return bool(sampling.logit_bias) or sampling.min_tokens > 0

    @classmethod
    def of(cls, rows: Sequence[SampledRow], vocab_size: int) -> "Biases":
        """Arrays for the slots of a window."""
        biased = [(slot, *pair) for slot, row in enumerate(rows) for pair in row.sampling.logit_bias]
        barred = [
            (slot, token)
            for slot, row in enumerate(rows)
            if row.sampling.min_tokens > 0 and not row.has_grammar  # a grammar sees to it itself
            for token in row.stop_token_ids
        ]
        bias = mx.zeros((len(rows), vocab_size), dtype=mx.float32)
        if biased:
            slots, tokens, values = zip(*biased, strict=True)
            bias = bias.at[mx.array(slots), mx.array(tokens)].add(mx.array(values, dtype=mx.float32))
        is_barred = mx.zeros((len(rows), vocab_size), dtype=mx.bool_)
        if barred:
            slots, tokens = zip(*barred, strict=True)
            is_barred[mx.array(slots), mx.array(tokens)] = mx.array(True)
        until = [len(row.prompt) + row.sampling.min_tokens for row in rows]
        return cls(bias, is_barred, mx.array(until, dtype=mx.int32))

    def apply(self, logits: mx.array, positions: mx.array) -> mx.array:
        """Logits [B, K, V] of the tokens at absolute ``positions`` [B, K]."""
        is_early = (positions < self.barred_until[:, None])[..., None]
        return mx.where(is_early & self.is_barred[:, None], mx.array(-mx.inf), logits + self.bias[:, None])


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition over prompt and output, presence and frequency over the output."""

    is_in_prompt: mx.array  # [B, V] bool
    counts: mx.array  # [B, V] int32, in the output
    repetition: mx.array  # [B] float32
    presence: mx.array  # [B] float32
    frequency: mx.array  # [B] float32

    @staticmethod
    def are_wanted(sampling: Sampling) -> bool:
        """Whether a row has any."""
        return (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )

    @classmethod
    def of(cls, rows: Sequence[SampledRow], vocab_size: int) -> "Penalties":
        """Arrays for the slots of a window; only rows with a penalty are counted."""
        counted = [(slot, row) for slot, row in enumerate(rows) if cls.are_wanted(row.sampling)]
        repeating = [(slot, row.prompt) for slot, row in counted if row.sampling.repetition_penalty != 1]
        shape = (len(rows), vocab_size)
        settings = [row.sampling for row in rows]
        return cls(
            is_in_prompt=_count(mx.zeros(shape, dtype=mx.int32), repeating) > 0,
            counts=_count(mx.zeros(shape, dtype=mx.int32), [(slot, row.output) for slot, row in counted]),
            repetition=mx.array([s.repetition_penalty for s in settings], dtype=mx.float32),
            presence=mx.array([s.presence_penalty for s in settings], dtype=mx.float32),
            frequency=mx.array([s.frequency_penalty for s in settings], dtype=mx.float32),
        )

    def after(self, chosen: np.ndarray, kept: np.ndarray) -> "Penalties":
        """The counts after a round whose first ``kept`` [B] tokens of ``chosen`` [B, K] were committed."""
        said = [(slot, chosen[slot, : kept[slot]].tolist()) for slot in np.flatnonzero(kept).tolist()]
        return replace(self, counts=_count(self.counts, said))

    def apply(self, logits: mx.array, drafted: mx.array) -> mx.array:
        """Logits [B, K, V] of a block whose inputs after the anchor are ``drafted`` [B, K - 1]."""
        penalised = self._penalise(logits, self.counts[:, None], self.is_in_prompt[:, None])
        K = logits.shape[1]
        if K == 1:
            return penalised
        # How often each drafted token occurs among the drafts before each place: [B, K, K - 1].
        is_same = (drafted[:, :, None] == drafted[:, None, :]).astype(mx.int32)
        is_before = (mx.arange(K)[:, None] > mx.arange(K - 1)).astype(mx.int32)
        in_block = mx.sum(is_before[None, :, :, None] * is_same[:, None], axis=2)
        index = mx.broadcast_to(drafted[:, None], in_block.shape)
        counts = mx.take_along_axis(self.counts, drafted, axis=1)[:, None] + in_block
        is_in_prompt = mx.take_along_axis(self.is_in_prompt, drafted, axis=1)[:, None]
        fresh = self._penalise(mx.take_along_axis(logits, index, axis=-1), counts, is_in_prompt)
        # A token drafted twice is written twice, with the same number.
        return mx.put_along_axis(penalised, index, fresh, axis=-1)

    def _penalise(self, logits: mx.array, counts: mx.array, is_in_prompt: mx.array) -> mx.array:
        repetition = self.repetition[:, None, None]
        is_said = counts > 0
        shrunk = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(is_said | is_in_prompt, shrunk, logits)
        logits = logits - self.frequency[:, None, None] * counts
        return logits - self.presence[:, None, None] * is_said


def allowed_only(logits: mx.array, masks: mx.array) -> mx.array:
    """Logits [B, K, V] of the tokens whose bits are set in ``masks`` [B, K, ceil(V / 32)] uint32."""
    B, K, V = logits.shape
    bits = mx.bitwise_and(mx.right_shift(masks[..., None], mx.arange(32, dtype=mx.uint32)), 1)
    return mx.where(bits.reshape(B, K, -1)[..., :V] > 0, logits, mx.array(-mx.inf, dtype=logits.dtype))


def check_wishes(request: RowRequest, vocab_size: int) -> None:
    """Raise ``InvalidRequest`` for what an edge should have refused: MLX would write out of bounds."""
    sampling, stop_token_ids = request.sampling, request.stop_token_ids
    named = [("logit_bias", token) for token, _ in sampling.logit_bias]
    if sampling.min_tokens > 0:
        named += [("stop_token_ids", token) for token in stop_token_ids]
        if len(stop_token_ids) >= vocab_size:
            raise InvalidRequest("'min_tokens' would bar every token", param="min_tokens")
    for param, token in named:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"'{param}': token ids must lie in 0..{vocab_size - 1}", param=param)
    if request.num_top_logprobs is not None and not 0 <= request.num_top_logprobs <= vocab_size:
        raise InvalidRequest(f"'top_logprobs' must lie in 0..{vocab_size}", param="top_logprobs")
    if request.wants_prompt_logprobs and request.num_top_logprobs is None:
        raise InvalidRequest(
            "log-probabilities of the prompt come with those of the answer", param="logprobs"
        )
    if not sampling.repetition_penalty > 0:
        raise InvalidRequest("'repetition_penalty' must be above 0", param="repetition_penalty")


def as_list(group: Biases | Penalties) -> list[mx.array]:
    """The arrays alone, in field order, for a compiled region."""
    return [getattr(group, f.name) for f in fields(group)]


def _count(counts: mx.array, tokens: Sequence[tuple[int, Sequence[int]]]) -> mx.array:
    """``counts`` [B, V] with one more for every token of every slot named."""
    slots = np.repeat([slot for slot, _ in tokens], [len(ids) for _, ids in tokens]).astype(np.int32)
    if not len(slots):
        return counts
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for _, ids in tokens])
    return counts.at[mx.array(slots), mx.array(ids)].add(mx.array(1, dtype=mx.int32))
