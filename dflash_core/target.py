"""The target in process: prefill, and the verify that chooses, walks, accepts and commits on the device.

One compiled region per (sampling variant, accept policy) and shape plays a whole verify: block
forward, the target's own tokens, accepted counts per row, recurrent commit. The host reads one small
integer array per round. Everything here runs on the MLX thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_core.accept import ACCEPT_POLICIES, walk
from dflash_core.models.drafter import FeatureProjection
from dflash_core.models.target import CacheArrays, TargetNetwork
from dflash_core.row_cache import CacheShape, RowCaches
from dflash_core.sampling import ArrayLists, SamplingArrays, Variant, choose


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verify under way."""

    packed: mx.array  # [B, K + 3] int32: chosen, walked, accepted, finite
    features: mx.array  # [B, K, D] projected features of the block's inputs

    def read(self) -> Outcome:
        """Wait for the round and copy its integers: the one blocking read of a round."""
        table = np.array(self.packed)
        return Outcome(
            chosen=table[:, :-3], walked=table[:, -3], accepted=table[:, -2], is_finite=table[:, -1] > 0
        )


class Target:
    """A loaded target with the projection of the drafter that it feeds (none: no features)."""

    def __init__(
        self,
        network: TargetNetwork,
        *,
        cache_shape: CacheShape,
        vocab_size: int,
        max_context: int,
        projection: FeatureProjection | None = None,
        feature_size: int = 0,
    ):
        self.network = network
        self.cache_shape = cache_shape
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._projection = projection
        self._feature_size = feature_size or 1  # without taps: one number that nobody reads
        self._verifies: dict[tuple[Variant, str], Callable[..., Any]] = {}
        self._prefills: dict[Variant, Callable[..., Any]] = {}

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
        )

    def new_caches(self, num_slots: int, capacity: int) -> RowCaches:
        """Empty caches."""
        return RowCaches(self.cache_shape, num_slots, capacity)

    def prefill(
        self, caches: RowCaches, tokens: np.ndarray, counts: np.ndarray, sampling: SamplingArrays
    ) -> Verdict:
        """Run ``tokens`` [B, T] after each slot's length, ``counts`` [B] of them real; advances the caches.

        The outcome's ``chosen`` [B, 1] is the target's own token after each row's last real one; the
        features [B, T, D] are garbage beyond the counts.
        """
        caches.reserve(tokens.shape[1])
        lengths = mx.array(caches.lengths)
        run = self._prefills.get(sampling.variant)
        if run is None:
            run = self._prefills[sampling.variant] = mx.compile(self._make_prefill(sampling.variant))
        arrays = caches.take()
        packed, features, *rest = run(
            mx.array(tokens),
            lengths,
            mx.array(counts),
            sampling.as_lists(),
            arrays.keys,
            arrays.values,
            arrays.states,
            arrays.conv,
        )
        del arrays
        mx.async_eval(packed, features, *rest)
        caches.put(CacheArrays(*rest))
        caches.lengths += counts
        return Verdict(packed, features)

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
        return Verdict(packed, features)

    def _project(self, features: mx.array) -> mx.array:
        return features if self._projection is None else self._projection(features)

    def _make_prefill(self, variant: Variant) -> Callable[..., Any]:
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
            hidden, features, caches = self.network.prefill(tokens, lengths, counts, caches)
            logits = self.network.logits(hidden)[:, None]
            chosen = choose(logits, (lengths + counts)[:, None], SamplingArrays.of_lists(variant, sampling))
            is_finite = _is_sound(hidden[:, None], logits, chosen)
            none = mx.zeros_like(chosen)
            packed = mx.concatenate([chosen, none, none, is_finite.astype(mx.int32)], axis=1)
            return packed, self._project(features), caches.keys, caches.values, caches.states, caches.conv

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
            return packed, self._project(features), caches.keys, caches.values, caches.states, caches.conv

        return run


def _is_sound(hidden: mx.array, logits: mx.array, chosen: mx.array) -> mx.array:
    """Whether a choice [B, K] rests on finite numbers, without a pass over all logits.

    A non-finite hidden state makes its whole row of logits non-finite, and D is far below V.
    """
    top = mx.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    return mx.isfinite(mx.sum(hidden.astype(mx.float32), axis=-1)) & mx.isfinite(top)
