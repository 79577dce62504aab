"""What a drafter is: a DFlash block-diffusion stack without embedding and head."""

from dataclasses import dataclass
from typing import Literal

DrafterLayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A rope stretched beyond its training length, in one of the kinds that mlx-lm and torch agree on."""

    kind: Literal["linear", "yarn"]
    factor: float
    original_max_positions: int | None = None  # yarn only

    def as_config(self) -> dict[str, str | float | int]:
        """Write it as the ``scaling_config`` of mlx-lm's ``initialize_rope``."""
        config: dict[str, str | float | int] = {"type": self.kind, "factor": self.factor}
        if self.original_max_positions is not None:
            config["original_max_position_embeddings"] = self.original_max_positions
        return config


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter's config facts; picklable, without arrays."""

    num_layers: int
    hidden_size: int  # the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    vocab_size: int  # the target's
    block_size: int  # widest block, the anchor included: at most block_size - 1 drafts
    mask_token_id: int
    taps: tuple[int, ...]  # target layers after which the residual stream is tapped, ascending
    layer_kinds: tuple[DrafterLayerKind, ...]
    is_causal: tuple[bool, ...]  # per layer, inside the block
    sliding_window: int | None  # positions a sliding layer sees, itself included; None: no such layer
    attention_bias: bool
    final_logit_softcap: float | None
    embedding_scale: float
    max_positions: int
    dtype: str  # as stored; at run time it follows the target's activations
    fingerprint: str

    @property
    def feature_size(self) -> int:
        """Width F of the concatenated taps, before ``fc``."""
        return len(self.taps) * self.hidden_size
