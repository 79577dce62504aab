"""The tensors of a DFlash drafter: eleven per layer and three global ones, checked from headers alone."""

from collections.abc import Mapping
from typing import Final

from dflash_core.checkpoints.drafter_kinds import refuse_other_tensors
from dflash_core.checkpoints.drafter_spec import DrafterSpec
from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.errors import CheckpointError

Shape = tuple[int, ...]

#: Some old exports carry the target's embedding and head along; ours come from the target itself.
_BORROWED: Final = ("embed_tokens.", "lm_head.")


def plain_name(name: str) -> str | None:
    """Return a tensor's name without ``model.``; None for embedding and head."""
    short = name.removeprefix("model.")
    return None if short.startswith(_BORROWED) else short


def expected_tensors(spec: DrafterSpec) -> dict[str, Shape]:
    """List every tensor with its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.attention_bias:
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        layer |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    table = {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}
    return table | {
        "fc.weight": (hidden, spec.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


def check_drafter_tensors(
    spec: DrafterSpec, tensors: Mapping[str, TensorEntry], source: str
) -> dict[str, str]:
    """Hold a checkpoint's tensors against the table; return plain name to stored name.

    Raises:
        CheckpointError: the first tensor that belongs to another kind of drafter, is missing, given twice,
            not expected, or of another shape or dtype.
    """
    refuse_other_tensors(tensors, source)
    stored: dict[str, str] = {}
    for name in tensors:
        short = plain_name(name)
        if short in stored:
            raise CheckpointError(
                f'{source}: tensors "{stored[short]}" and "{name}" are one; expected it once'
            )
        if short is not None:
            stored[short] = name
    table = expected_tensors(spec)
    for name, shape in table.items():
        if name not in stored:
            raise CheckpointError(f'{source}: tensor "{name}" is missing; expected shape {list(shape)}')
        _check_entry(spec, name, shape, tensors[stored[name]])
    for name in stored:
        if name not in table:
            raise CheckpointError(
                f'{source}: tensor "{stored[name]}" is not expected in a DFlash drafter of '
                f"{spec.num_layers} layers"
            )
    return stored


def _check_entry(spec: DrafterSpec, name: str, shape: Shape, entry: TensorEntry) -> None:
    if entry.shape != shape:
        why = f" ({len(spec.taps)} taps of {spec.hidden_size})" if name == "fc.weight" else ""
        raise CheckpointError(
            f'{entry.file}: tensor "{name}" has shape {list(entry.shape)}; expected {list(shape)}{why}'
        )
    if entry.dtype not in FLOATS:
        raise CheckpointError(
            f'{entry.file}: tensor "{name}" has dtype {entry.dtype}; expected {", ".join(FLOATS)}'
        )
