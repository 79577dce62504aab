"""From checkpoints to the parts of a lane. Call on the thread that will compute: MLX arrays left lazy
belong to the thread that made them."""

import copy
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.rope_utils import initialize_rope

from dflash_core.checkpoints import (
    DrafterSpec,
    TargetSpec,
    load_drafter_weights,
    load_embedding_and_head,
    load_target,
    read_drafter_spec,
    read_target_spec,
)
from dflash_core.drafter import LocalDrafter
from dflash_core.models.drafter import DrafterNetwork, DrafterShape, FeatureProjection
from dflash_core.models.target import TargetNetwork
from dflash_core.row_cache import CacheShape
from dflash_core.target import Target
from dflash_core.text.grammar import Grammars


@dataclass(frozen=True, slots=True)
class LoadedLane:
    """A target with its drafter, in one process."""

    target: Target
    drafter: LocalDrafter
    target_spec: TargetSpec
    drafter_spec: DrafterSpec


def load_lane(
    target_path: Path, drafter_path: Path, *, dtype: mx.Dtype | None = None, packed: bool | None = None
) -> LoadedLane:
    """Load both parts into this process. ``dtype`` and ``packed`` as ``load_target`` takes them.

    Raises CheckpointError.
    """
    target, target_spec = build_target(target_path, drafter_path, dtype=dtype, packed=packed)
    drafter, drafter_spec = build_drafter(target_path, drafter_path, dtype=dtype, packed=packed)
    return LoadedLane(target, drafter, target_spec, drafter_spec)


def build_target(
    target_path: Path,
    drafter_path: Path | None,
    *,
    dtype: mx.Dtype | None = None,
    packed: bool | None = None,
) -> tuple[Target, TargetSpec]:
    """The target with the feature projection of its drafter; without one it taps nothing."""
    loaded = load_target(target_path, dtype=dtype, packed=packed)
    spec = loaded.spec
    target = Target(
        TargetNetwork(loaded.model.language_model, ()),
        cache_shape=target_cache_shape(spec, loaded.dtype),
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        grammars=Grammars.of_checkpoint(target_path, spec.vocab_size),
    )
    return (target if drafter_path is None else feed_drafter(target, spec, drafter_path)), spec


def feed_drafter(target: Target, spec: TargetSpec, drafter_path: Path) -> Target:
    """The same target, tapped for a drafter and with its projection, whose weights are read here.

    Raises CheckpointError.
    """
    drafter = read_drafter_spec(drafter_path, spec)
    weights = load_drafter_weights(drafter_path, drafter, target.feature_dtype)
    network = copy.copy(target.network)
    network.taps = drafter.taps
    return Target(
        network,
        cache_shape=target.cache_shape,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        projection=FeatureProjection(weights, drafter.rms_norm_eps),
        feature_size=drafter.hidden_size,
        grammars=target.grammars,
    )


def build_drafter(
    target_path: Path, drafter_path: Path, *, dtype: mx.Dtype | None = None, packed: bool | None = None
) -> tuple[LocalDrafter, DrafterSpec]:
    """The drafter alone; of the target it reads only embedding and head."""
    spec = read_drafter_spec(drafter_path, read_target_spec(target_path))
    shared = load_embedding_and_head(target_path, dtype=dtype, packed=packed)
    weights = load_drafter_weights(drafter_path, spec, shared.dtype)
    network = DrafterNetwork(drafter_shape(spec), weights, shared.embed, shared.logits)
    return LocalDrafter(
        network, cache_shape=drafter_cache_shape(spec, shared.dtype), block_size=spec.block_size
    ), spec


def drafter_shape(spec: DrafterSpec) -> DrafterShape:
    """The network's view of a drafter's config."""
    return DrafterShape(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=initialize_rope(
            spec.head_dim,
            base=spec.rope_theta,
            traditional=False,
            scaling_config=None if spec.rope_scaling is None else spec.rope_scaling.as_config(),
            max_position_embeddings=spec.max_positions,
        ),
        mask_token_id=spec.mask_token_id,
        windows=tuple(spec.sliding_window if kind == "sliding" else None for kind in spec.layer_kinds),
        is_causal=spec.is_causal,
        embedding_scale=spec.embedding_scale,
        logit_softcap=spec.final_logit_softcap,
    )


def drafter_cache_shape(spec: DrafterSpec, dtype: mx.Dtype) -> CacheShape:
    """Sizes of a drafter's row contexts."""
    return CacheShape(
        num_attention_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_delta_layers=0,
        num_v_heads=0,
        v_dim=0,
        k_dim=0,
        conv_window=0,
        conv_dim=0,
        dtype=dtype,
        state_dtype=dtype,
    )


def target_cache_shape(spec: TargetSpec, dtype: mx.Dtype) -> CacheShape:
    """Sizes of a target's row caches."""
    return CacheShape(
        num_attention_layers=spec.layer_kinds.count("full"),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_delta_layers=spec.layer_kinds.count("linear"),
        num_v_heads=spec.linear_value_heads,
        v_dim=spec.linear_value_dim,
        k_dim=spec.linear_key_dim,
        conv_window=spec.conv_kernel - 1,
        conv_dim=spec.conv_dim,
        dtype=dtype,
        state_dtype=mx.float64 if dtype == mx.float64 else mx.float32,
    )
