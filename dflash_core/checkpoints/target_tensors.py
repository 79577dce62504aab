"""The tensors that a dense Qwen3.5 text model must have, checked by name, shape and dtype from headers alone.

Names here are those of a plain text checkpoint (``model.layers.0...``, ``lm_head.weight``); wrapped ones are
brought to that form by ``text_name``.
"""

from collections.abc import Mapping
from typing import Final

from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.packed import check_packed
from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.errors import CheckpointError

Shape = tuple[int, ...]

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"
_VISION: Final = ("vision_tower.", "model.visual.", "visual.")


def text_name(name: str) -> str | None:
    """Return a tensor's name without VLM wrapping; None for vision and multi-token-prediction tensors."""
    if name.startswith(_VISION) or "mtp." in name:
        return None
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def text_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Keep the text model's tensors, under their plain names.

    Raises:
        CheckpointError: two tensors mean the same one.
    """
    plain: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        short = text_name(name)
        if short in plain:
            raise CheckpointError(f'{entry.file}: tensor "{name}" is a second "{short}"; expected one')
        if short is not None:
            plain[short] = entry
    return plain


def expected_tensors(spec: TargetSpec) -> dict[str, Shape]:
    """List every tensor of the text model, unquantised, the convolution in torch's layout [C, 1, kernel]."""
    hidden = spec.hidden_size
    table: dict[str, Shape] = {
        f"{EMBEDDING}.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        table[f"{HEAD}.weight"] = (spec.vocab_size, hidden)
    for index, kind in enumerate(spec.layer_kinds):
        mixer = _linear_tensors(spec) if kind == "linear" else _attention_tensors(spec)
        layer = mixer | {
            "mlp.gate_proj.weight": (spec.intermediate_size, hidden),
            "mlp.up_proj.weight": (spec.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, spec.intermediate_size),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        table |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return table


def _linear_tensors(spec: TargetSpec) -> dict[str, Shape]:
    hidden, heads = spec.hidden_size, spec.linear_value_heads
    values = heads * spec.linear_value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (spec.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (spec.conv_dim, 1, spec.conv_kernel),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (spec.linear_value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _attention_tensors(spec: TargetSpec) -> dict[str, Shape]:
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table: dict[str, Shape] = {
        "self_attn.q_proj.weight": (2 * queries, hidden),  # query and output gate, per head
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
    }
    if spec.attention_bias:
        outputs = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        table |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    return table


def check_tensors(spec: TargetSpec, tensors: Mapping[str, TensorEntry], source: str) -> None:
    """Hold a checkpoint's text tensors against the table.

    Raises:
        CheckpointError: the first tensor that is missing, of another shape or dtype, or not expected.
    """
    left = set(tensors)
    layouts: dict[Shape, str] = {}
    for name, shape in expected_tensors(spec).items():
        entry = tensors.get(name)
        if entry is None:
            raise CheckpointError(f'{source}: tensor "{name}" is missing; expected shape {list(shape)}')
        left.discard(name)
        base = name.removesuffix(".weight")
        if f"{base}.scales" in tensors:
            left -= {f"{base}.scales", f"{base}.biases"}
            check_packed(base, shape, tensors)
        elif name.endswith("conv1d.weight"):
            layouts.setdefault(_check_convolution(name, shape, entry), name)
        else:
            _check_plain(name, shape, entry)
    _check_layouts(source, layouts)
    for name in sorted(left):
        if not (spec.tie_word_embeddings and name.startswith(f"{HEAD}.")):
            raise CheckpointError(f'{source}: tensor "{name}" is not expected in a dense Qwen3.5 text model')


def _check_plain(name: str, shape: Shape, entry: TensorEntry) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f'{entry.file}: tensor "{name}" has shape {list(entry.shape)}; expected {list(shape)}'
        )
    if entry.dtype not in FLOATS:
        raise CheckpointError(
            f'{entry.file}: tensor "{name}" has dtype {entry.dtype}; expected {", ".join(FLOATS)}'
        )


def _check_convolution(name: str, shape: Shape, entry: TensorEntry) -> Shape:
    """Return the layout found: torch's [C, 1, kernel] or MLX's [C, kernel, 1]."""
    channels, one, kernel = shape
    mlx_shape = (channels, kernel, one)
    _check_plain(name, mlx_shape if entry.shape == mlx_shape else shape, entry)
    return entry.shape


def _check_layouts(source: str, layouts: Mapping[Shape, str]) -> None:
    # One convolution in torch's layout makes mlx-lm add 1.0 to every norm of the checkpoint: a mixture
    # would load without an error and be wrong.
    if len(layouts) > 1:
        names = " and ".join(f'"{name}" {list(shape)}' for shape, name in layouts.items())
        raise CheckpointError(f"{source}: convolutions in two layouts, {names}; expected one")
