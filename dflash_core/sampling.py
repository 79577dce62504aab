"""How the target chooses its own token at every position of a block.

One path for greedy and sampled rows: the arg-max of ``logits + T * g`` with Gumbel noise g keyed by
(request seed, absolute position of the token); T = 0 is greedy. A draft is accepted while it equals
that choice, so the emitted sequence is a function of the request alone: the same with and without
speculation, in any batch, after any join or restart. ``logits`` are the target's own after a row's
biases, penalties and grammar, in this order (see ``processors``); truncations (top-k, top-p, min-p, in
that order) act on them without the noise.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from dflash_core.logprobs import Asked
from dflash_core.ops import fastmath
from dflash_core.processors import Biases, Penalties, SampledRow, allowed_only, as_list
from dflash_core.request import Sampling

IDLE = SampledRow(Sampling())
ArrayLists = dict[str, list[mx.array]]


@dataclass(frozen=True, slots=True)
class Variant:
    """The least work that serves every row of a window; each has a compiled graph of its own."""

    rule: Literal["greedy", "sampled", "truncated"] = "greedy"
    is_biased: bool = False
    is_penalised: bool = False
    is_masked: bool = False  # by a grammar
    num_top: int | None = None  # likeliest tokens measured at each place; None: no log-probabilities


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """The settings of a window's rows as arrays; made anew when rows come or go."""

    variant: Variant
    temperature: mx.array  # [B] float32, 0 for greedy rows
    top_k: mx.array  # [B] int32, V where off
    top_p: mx.array  # [B] float32
    min_p: mx.array  # [B] float32
    keys: mx.array  # [B, 2] uint32

    biases: Biases | None = None
    penalties: Penalties | None = None
    masks: mx.array | None = None  # [B, K, ceil(V / 32)] uint32, what grammars allow; of one round
    asked: Asked | None = None  # whose log-probabilities are wanted

    def as_lists(self) -> ArrayLists:
        """The arrays alone, for a compiled region."""
        lists = {"rule": [self.temperature, self.top_k, self.top_p, self.min_p, self.keys]}
        if self.biases is not None:
            lists["biases"] = as_list(self.biases)
        if self.penalties is not None:
            lists["penalties"] = as_list(self.penalties)
        if self.variant.is_masked:
            assert self.masks is not None, "a grammar's row is played without its grammar"
            lists["masks"] = [self.masks]
        if self.asked is not None:
            lists["asked"] = [self.asked.padded()]
        return lists

    @classmethod
    def of_lists(cls, variant: Variant, lists: ArrayLists) -> "SamplingArrays":
        """The other way."""
        return cls(
            variant,
            *lists["rule"],
            biases=Biases(*lists["biases"]) if variant.is_biased else None,
            penalties=Penalties(*lists["penalties"]) if variant.is_penalised else None,
            masks=lists["masks"][0] if variant.is_masked else None,
        )

    def masked(self, places: np.ndarray) -> "SamplingArrays":
        """The arrays for a round whose grammars allow ``places`` [B, K, ceil(V / 32)] int32."""
        return replace(self, masks=mx.array(places.view(np.uint32)))

    def after(self, chosen: np.ndarray, kept: np.ndarray) -> "SamplingArrays":
        """The arrays after a round whose first ``kept`` [B] tokens of ``chosen`` [B, K] were committed."""
        if self.penalties is None:
            return self
        return replace(self, penalties=self.penalties.after(chosen, kept))


def seed_key(seed: int) -> tuple[int, int]:
    """Two 32-bit words from a 64-bit seed, far apart for neighbouring seeds."""
    digest = hashlib.sha256((seed & (2**64 - 1)).to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def pack(rows: Sequence[SampledRow | Sampling | None], vocab_size: int) -> SamplingArrays:
    """Arrays for the slots of a window; ``None`` is an idle slot, settings alone a row without a past."""
    slots = [SampledRow(row) if isinstance(row, Sampling) else row or IDLE for row in rows]
    settings = [row.sampling for row in slots]
    sampled = [s for s in settings if s.temperature > 0]
    is_truncated = any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in sampled)
    asked = Asked.of([row.num_top for row in slots], vocab_size)
    variant = Variant(
        rule="truncated" if is_truncated else "sampled" if sampled else "greedy",
        is_biased=any(map(Biases.are_wanted, settings)),
        is_penalised=any(map(Penalties.are_wanted, settings)),
        is_masked=any(row.has_grammar for row in slots),
        num_top=None if asked is None else asked.num_top,
    )
    top_k = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in settings]
    return SamplingArrays(
        variant=variant,
        temperature=mx.array([s.temperature for s in settings], dtype=mx.float32),
        top_k=mx.array(top_k, dtype=mx.int32),
        top_p=mx.array([s.top_p for s in settings], dtype=mx.float32),
        min_p=mx.array([s.min_p for s in settings], dtype=mx.float32),
        keys=mx.array(np.array([seed_key(s.seed) for s in settings], dtype=np.uint32)),
        biases=Biases.of(slots, vocab_size) if variant.is_biased else None,
        penalties=Penalties.of(slots, vocab_size) if variant.is_penalised else None,
        asked=asked,
    )


def choose(
    logits: mx.array, positions: mx.array, arrays: SamplingArrays, drafted: mx.array | None = None
) -> mx.array:
    """The target's token at each place: logits [B, K, V], absolute positions [B, K] -> ids [B, K].

    ``drafted`` [B, K - 1] are the block's inputs after the anchor; may be left out where K is 1.
    """
    logits = process(logits, positions, arrays, drafted)
    if arrays.variant.rule == "greedy":
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    logits = logits.astype(mx.float32)
    temperature = arrays.temperature[:, None, None]
    noisy = logits + temperature * gumbel(arrays.keys, positions, logits.shape[-1])
    if arrays.variant.rule == "truncated":
        noisy = mx.where(keep_mask(logits, arrays), noisy, mx.array(-mx.inf))
    # Greedy rows of a mixed window take the plain logits: not even a rounding differs from greedy.
    scores = mx.where(temperature > 0, noisy, logits)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def process(
    logits: mx.array, positions: mx.array, arrays: SamplingArrays, drafted: mx.array | None = None
) -> mx.array:
    """Logits after biases, penalties and grammars, if any row of the window has some.

    Arguments as ``choose``.
    """
    if arrays.biases is None and arrays.penalties is None and arrays.masks is None:
        return logits
    logits = logits.astype(mx.float32)
    if arrays.biases is not None:
        logits = arrays.biases.apply(logits, positions)
    if arrays.penalties is not None:
        if drafted is None:
            drafted = mx.zeros((logits.shape[0], 0), dtype=mx.int32)
        logits = arrays.penalties.apply(logits, drafted)
    if arrays.masks is not None:
        logits = allowed_only(logits, arrays.masks)
    return logits


def gumbel(keys: mx.array, positions: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise [B, K, V] from row keys [B, 2] and absolute positions [B, K].

    ``-log(-log1p(-u))`` with u = (bits + 1/2) / 2^32 keeps the resolution where noise is large
    (MLX's own Gumbel is coarse near its top).
    """
    B, K = positions.shape
    low = keys[:, 1:] + positions.astype(mx.uint32)  # [B, K], wraps
    high = mx.broadcast_to(keys[:, :1], (B, K))
    place_keys = mx.stack([high, low], axis=-1).reshape(B * K, 2)

    def uniform(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(vocab_size,), key=key)

    u = mx.vmap(uniform)(place_keys)
    u = u + 2.0**-33  # uniform is bits / 2^32: fine near 0, where the largest noise comes from
    return -mx.log(-mx.log1p(-u)).reshape(B, K, vocab_size)


def keep_mask(logits: mx.array, arrays: SamplingArrays) -> mx.array:
    """Which tokens survive top-k, then top-p, then min-p [B, K, V]; ties at the cut all survive.

    Each cut keeps a prefix of the tokens sorted by logit, so one sort serves all three.
    """
    temperature = mx.maximum(arrays.temperature, 1e-6)[:, None, None]
    descending = -mx.sort(-logits, axis=-1)
    rank = mx.arange(logits.shape[-1])
    in_k = rank < arrays.top_k[:, None, None]
    scaled = mx.where(in_k, (descending - descending[..., :1]) / temperature, mx.array(-mx.inf))
    p = fastmath.exp(mx.maximum(scaled, -80.0)) * in_k
    p = p / mx.sum(p, axis=-1, keepdims=True)
    before = mx.cumsum(p, axis=-1) - p
    # At top-p 1 nothing is cut: a float32 sum reaches 1 before the tail does.
    top_p = arrays.top_p[:, None, None]
    in_p = (before < top_p) | (rank == 0) | (top_p >= 1)
    p = mx.where(in_p, p, 0.0)  # min-p compares probabilities of what top-p left, a common factor
    in_min = p >= arrays.min_p[:, None, None] * p[..., :1]
    kept = mx.sum((in_k & in_p & in_min).astype(mx.int32), axis=-1, keepdims=True)
    cut = mx.take_along_axis(descending, mx.maximum(kept - 1, 0), axis=-1)
    return logits >= cut
