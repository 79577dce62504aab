"""The target in process: prefill, and the verify that chooses, walks, accepts and commits on the device.

One compiled region per (sampling variant, accept policy) and shape plays a whole verify: block
forward, the target's own tokens, accepted counts per row, recurrent commit. The host reads one small
integer array per round. Everything here runs on the MLX thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_core.accept import ACCEPT_POLICIES, walk
from dflash_core.events import TokenLogprobs
from dflash_core.logprobs import Asked, measure, unpack
from dflash_core.models.drafter import FeatureProjection
from dflash_core.models.target import CacheArrays, TargetNetwork
from dflash_core.request import RowRequest
from dflash_core.row_cache import CacheShape, RowCaches
from dflash_core.sampling import ArrayLists, SamplingArrays, Variant, choose
from dflash_core.text.grammar import Grammars


@dataclass(frozen=True, slots=True)
class BlockInput:
    """What the host says about a round's rows; idle slots have budget 0."""

    anchors: mx.array  # [B] int32, newest emitted tokens
    budgets: np.ndarray  # [B] int32, tokens a row may still emit
    sampling: SamplingArrays


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round as read back by the host."""

    chosen: np.ndarray  # [B, K] the target's own tokens
    walked: np.ndarray  # [B] leading drafts equal to them
    accepted: np.ndarray  # [B] drafts kept by policy and budget; -1 for idle slots
    is_finite: np.ndarray  # [B] bool
    numbers: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])  # slot -> [K, 1 + 2N]

    def logprobs(self, slot: int, row: RowRequest, count: int) -> tuple[TokenLogprobs, ...]:
        """Of the first ``count`` tokens chosen for a row, if it asked."""
        if row.num_top_logprobs is None:
            return ()
        return unpack(self.numbers[slot][:count], row.num_top_logprobs)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Prompts whose tokens are measured as they are read."""

    asked: Asked
    tokens: np.ndarray  # [R, T] int32: what follows each input of the slots asked for; padded as they are


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verify under way."""

    packed: mx.array  # [B, K + 3] int32: chosen, walked, accepted, finite; flat if numbers come behind
    features: mx.array  # [B, K, D] projected features of the block's inputs
    asked: Asked | None = None
    width: int = 1  # K
    prompt_numbers: mx.array | None = None  # [R, T, 1 + 2N] int32, see ``PromptScoring``

    def read(self) -> Outcome:
        """Wait for the round and copy its integers: the one blocking read of a round."""
        table, numbers = np.array(self.packed), {}
        if self.asked is not None:
            size = self.features.shape[0] * (self.width + 3)
            behind = table[size:].reshape(-1, self.width, 1 + 2 * self.asked.num_top)
            numbers = dict(zip(self.asked.slots, behind, strict=False))
            table = table[:size].reshape(-1, self.width + 3)
        return Outcome(
            chosen=table[:, :-3],
            walked=table[:, -3],
            accepted=table[:, -2],
            is_finite=table[:, -1] > 0,
            numbers=numbers,
        )


class Target:
    """A loaded target with the projection of the drafter that it feeds (none: no features).

    ``protocols.Target`` is the part of it that the round loop knows.
    """

    def __init__(
        self,
        network: TargetNetwork,
        *,
        cache_shape: CacheShape,
        vocab_size: int,
        max_context: int,
        projection: FeatureProjection | None = None,
        feature_size: int = 0,
        grammars: Grammars | None = None,
    ):
        self.network = network
        self.cache_shape = cache_shape
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.grammars = grammars  # of its vocabulary; none: a row can have no grammar
        self._projection = projection
        self._feature_size = feature_size or 1  # without taps: one number that nobody reads
        self._verifies: dict[tuple[Variant, str], Callable[..., Any]] = {}
        self._prefills: dict[tuple[Variant, int | None], Callable[..., Any]] = {}
        self._next_logits: Callable[..., mx.array] | None = None

    @property
    def feature_size(self) -> int:
        """Width of a projected feature."""
        return self._feature_size

    @property
    def feature_dtype(self) -> mx.Dtype:
        """Dtype of a projected feature."""
        return self.cache_shape.dtype

    def with_network(self, wrap: Callable[[TargetNetwork], TargetNetwork]) -> "Target":
        """The same target over another network: tests and controls wrap it."""
        return Target(
            wrap(self.network),
            cache_shape=self.cache_shape,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            projection=self._projection,
            feature_size=self._feature_size,
            grammars=self.grammars,
        )

    def new_caches(self, num_slots: int, capacity: int) -> RowCaches:
        """Empty caches."""
        return RowCaches(self.cache_shape, num_slots, capacity)

    def prefill(
        self,
        caches: RowCaches,
        tokens: np.ndarray,
        counts: np.ndarray,
        sampling: SamplingArrays,
        scoring: PromptScoring | None = None,
    ) -> Verdict:
        """Run ``tokens`` [B, T] after each slot's length, ``counts`` [B] of them real; advances the caches.

        The outcome's ``chosen`` [B, 1] is the target's own token after each row's last real one; the
        features [B, T, D] are garbage beyond the counts, as are the prompt's numbers.
        """
        caches.reserve(tokens.shape[1])
        lengths = mx.array(caches.lengths)
        key = sampling.variant, None if scoring is None else scoring.asked.num_top
        run = self._prefills.get(key)
        if run is None:
            run = self._prefills[key] = mx.compile(self._make_prefill(*key))
        lists = sampling.as_lists()
        if scoring is not None:
            lists["prompt"] = [scoring.asked.padded(), mx.array(scoring.tokens)]
        arrays = caches.take()
        packed, features, prompt_numbers, *rest = run(
            mx.array(tokens),
            lengths,
            mx.array(counts),
            lists,
            arrays.keys,
            arrays.values,
            arrays.states,
            arrays.conv,
        )
        del arrays
        mx.async_eval(packed, features, prompt_numbers, *rest)
        caches.put(CacheArrays(*rest))
        caches.lengths += counts
        numbers = prompt_numbers[0] if scoring is not None else None
        return Verdict(packed, features, sampling.asked, prompt_numbers=numbers)

    def verify(self, caches: RowCaches, block: BlockInput, drafts: mx.array, accept: str) -> Verdict:
        """Check ``drafts`` [B, K - 1] after the anchors and commit what the policy keeps.

        Keys and values are written for the whole block and recurrent states advance by the accepted
        count on the device; the caller advances ``caches.lengths`` from the outcome.
        """
        caches.reserve(drafts.shape[1] + 1)
        run = self._verifies.get((block.sampling.variant, accept))
        if run is None:
            run = mx.compile(self._make_verify(block.sampling.variant, accept))
            self._verifies[block.sampling.variant, accept] = run
        tokens = block.anchors[:, None]
        if drafts.shape[1] > 0:  # MLX's CUDA backend cannot take an empty array
            tokens = mx.concatenate([tokens, drafts], axis=1)
        lengths, budgets = mx.array(caches.lengths), mx.array(block.budgets)
        arrays = caches.take()
        packed, features, *rest = run(
            tokens,
            lengths,
            budgets,
            block.sampling.as_lists(),
            arrays.keys,
            arrays.values,
            arrays.states,
            arrays.conv,
        )
        del arrays
        mx.async_eval(packed, features, *rest)
        caches.put(CacheArrays(*rest))
        return Verdict(packed, features, block.sampling.asked, tokens.shape[1])

    def next_logits(self, caches: RowCaches, token: int) -> np.ndarray:
        """Logits [V] float32 of a lone row after ``token``; for whoever scores, not for rounds.

        The caches are spent. Compiled like every other forward: a round's numbers come from compiled ones.
        """
        caches.reserve(1)
        if self._next_logits is None:
            self._next_logits = mx.compile(self._make_next_logits())
        arrays = caches.take()
        lengths, tokens = mx.array(caches.lengths), mx.array([[token]], dtype=mx.int32)
        return np.array(
            self._next_logits(tokens, lengths, arrays.keys, arrays.values, arrays.states, arrays.conv)
        )

    def _make_next_logits(self) -> Callable[..., mx.array]:
        def run(
            tokens: mx.array,
            lengths: mx.array,
            keys: list[mx.array],
            values: list[mx.array],
            states: mx.array,
            conv: mx.array,
        ) -> mx.array:
            hidden, *_ = self.network.verify(tokens, lengths, CacheArrays(keys, values, states, conv))
            return self.network.logits(hidden)[0, 0].astype(mx.float32)

        return run

    def _project(self, features: mx.array) -> mx.array:
        return features if self._projection is None else self._projection(features)

    def _make_prefill(self, variant: Variant, num_top: int | None) -> Callable[..., Any]:
        def run(
            tokens: mx.array,
            lengths: mx.array,
            counts: mx.array,
            sampling: ArrayLists,
            keys: list[mx.array],
            values: list[mx.array],
            states: mx.array,
            conv: mx.array,
        ) -> tuple[Any, ...]:
            caches = CacheArrays(keys, values, states, conv)
            if num_top is None:
                hidden, features, caches = self.network.prefill(tokens, lengths, counts, caches)
                prompt_numbers = []
            else:
                every, features, caches = self.network.prefill(tokens, lengths, counts, caches, is_whole=True)
                slots, following = sampling["prompt"]
                prompt_numbers = [measure(self.network.logits(every[slots]), following, num_top)]
                hidden = mx.take_along_axis(every, mx.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
            logits = self.network.logits(hidden)[:, None]
            chosen = choose(logits, (lengths + counts)[:, None], SamplingArrays.of_lists(variant, sampling))
            is_finite = _is_sound(hidden[:, None], logits, chosen)
            none = mx.zeros_like(chosen)
            packed = mx.concatenate([chosen, none, none, is_finite.astype(mx.int32)], axis=1)
            packed = _with_numbers(packed, logits, chosen, variant, sampling)
            features = self._project(features)
            return packed, features, prompt_numbers, caches.keys, caches.values, caches.states, caches.conv

        return run

    def _make_verify(self, variant: Variant, accept: str) -> Callable[..., Any]:
        policy = ACCEPT_POLICIES[accept]

        def run(
            tokens: mx.array,
            lengths: mx.array,
            budgets: mx.array,
            sampling: ArrayLists,
            keys: list[mx.array],
            values: list[mx.array],
            states: mx.array,
            conv: mx.array,
        ) -> tuple[Any, ...]:
            caches = CacheArrays(keys, values, states, conv)
            hidden, features, caches, journal = self.network.verify(tokens, lengths, caches)
            positions = lengths[:, None] + mx.arange(1, tokens.shape[1] + 1)
            logits = self.network.logits(hidden)
            chosen = choose(logits, positions, SamplingArrays.of_lists(variant, sampling), tokens[:, 1:])
            is_live = budgets > 0
            walked = walk(tokens[:, 1:], chosen)
            accepted = mx.where(is_live, mx.minimum(policy(walked, is_live), budgets - 1), -1)
            kept = mx.arange(tokens.shape[1]) <= accepted[:, None]
            is_finite = mx.all(_is_sound(hidden, logits, chosen) | ~kept, axis=1)
            caches = self.network.commit(journal, caches, accepted + 1)
            columns = [chosen, walked[:, None], accepted[:, None], is_finite[:, None].astype(mx.int32)]
            packed = mx.concatenate(columns, axis=1)
            packed = _with_numbers(packed, logits, chosen, variant, sampling)
            return packed, self._project(features), caches.keys, caches.values, caches.states, caches.conv

        return run


def _with_numbers(
    packed: mx.array, logits: mx.array, chosen: mx.array, variant: Variant, sampling: ArrayLists
) -> mx.array:
    """``packed``, with the log-probabilities of the slots that asked behind it."""
    if variant.num_top is None:
        return packed
    (slots,) = sampling["asked"]
    numbers = measure(logits[slots], chosen[slots], variant.num_top)
    return mx.concatenate([packed.reshape(-1), numbers.reshape(-1)])


def _is_sound(hidden: mx.array, logits: mx.array, chosen: mx.array) -> mx.array:
    """Whether a choice [B, K] rests on finite numbers, without a pass over all logits.

    A non-finite hidden state makes its whole row of logits non-finite, and D is far below V.
    """
    top = mx.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return mx.isfinite(mx.sum(hidden.astype(mx.float32), axis=-1)) & mx.isfinite(top)
