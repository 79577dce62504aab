"""What a target is: a dense Qwen3.5 text model (gated delta net + full attention)."""

from dataclasses import dataclass
from typing import Literal

TargetLayerKind = Literal["linear", "full"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Affine quantisation as the config declares it; a single tensor may deviate (its shapes tell)."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target's config facts; picklable, without arrays."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_context: int  # positions the model was made for
    layer_kinds: tuple[TargetLayerKind, ...]
    num_heads: int  # attention layers
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    linear_key_heads: int  # gated delta layers
    linear_value_heads: int
    linear_key_dim: int  # per head
    linear_value_dim: int
    conv_kernel: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    dtype: str  # as stored: bfloat16, float16 or float32 (of the scales, if quantised)
    quantization: Quantization | None
    fingerprint: str

    @property
    def conv_dim(self) -> int:
        """Channels of a gated delta layer's convolution: queries, keys and values."""
        return (
            2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim
        )
