"""Reading a target's config and headers; what mlx-lm would default or ignore silently is refused here."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.fields import Fields, holder
from dflash_core.checkpoints.fingerprint import fingerprint
from dflash_core.checkpoints.json_file import CONFIG, read_config
from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.checkpoints.target_spec import Quantization, TargetLayerKind, TargetSpec
from dflash_core.checkpoints.target_tensors import EMBEDDING, check_tensors, text_tensors
from dflash_core.checkpoints.weight_files import WeightFiles, read_weight_files
from dflash_core.errors import CheckpointError

_MODEL_TYPES: Final = ("qwen3_5", "qwen3_5_text")
_KINDS: Final[dict[str, TargetLayerKind]] = {"linear_attention": "linear", "full_attention": "full"}
_PLAIN_ROPE: Final = ("default", "mrope")  # for text alone mrope is plain rope
_EXPERTS: Final = re.compile("expert|moe")
_WIDEST: Final = 2**20


def read_target_spec(path: Path) -> TargetSpec:
    """Read and check a target checkpoint without loading it: config, file list, tensor names and shapes.

    Raises:
        CheckpointError: not a dense Qwen3.5 text model that this engine can run; names file, key, the
            value found and what was expected.
    """
    return read_target_files(path)[0]


def read_max_context(path: Path) -> int:
    """Read how many positions a target was made for, from its config; raises as ``read_target_spec``."""
    top = Fields(read_config(path), str(path / CONFIG))
    _check_kind(path, top)
    return _max_context(text_section(top))


def _max_context(text: Fields) -> int:
    return text.integer("max_position_embeddings", 1, 2**30)


def read_target_files(path: Path) -> tuple[TargetSpec, WeightFiles]:
    """Read a target's spec together with its weight files; raises as ``read_target_spec``."""
    config = read_config(path)
    top = Fields(config, str(path / CONFIG))
    _check_kind(path, top)
    text = text_section(top)
    files = read_weight_files(path)
    tensors = text_tensors(files.tensors)
    quantization = _quantization(top, text, tensors)
    spec = _parse(top, text, _stored_dtype(path, tensors), quantization, fingerprint(config, files))
    check_tensors(spec, tensors, str(path))
    return spec, files


def text_section(top: Fields) -> Fields:
    """Return the part of the config that describes the text model; raises CheckpointError."""
    return top.section("text_config") if "text_config" in top else top


def _check_kind(path: Path, top: Fields) -> None:
    text = text_section(top)
    for section in (top, text):
        if "model_type" not in section and section is top:
            raise section.error("model_type", " or ".join(_MODEL_TYPES))
        if (section.text("model_type") or _MODEL_TYPES[0]) not in _MODEL_TYPES:
            raise section.error("model_type", f"{' or '.join(_MODEL_TYPES)} (dense Qwen3.5)")
    for key in text:
        if _EXPERTS.search(key) and text.get(key):
            raise text.error(key, "a dense model: mixtures of experts are not served")
    for key in ("model_file", "quantize_activations"):
        if top.get(key):
            raise top.error(key, "no such key: custom code and quantised activations are never loaded")
    if (path / "hf_quant_config.json").exists():
        raise CheckpointError(
            f"{path / 'hf_quant_config.json'}: found; expected MLX affine quantisation or none"
        )


def _parse(
    top: Fields, text: Fields, dtype: str, quantization: Quantization | None, fingerprint: str
) -> TargetSpec:
    heads = text.integer("num_attention_heads", 1, 1024)
    value_heads = text.integer("linear_num_value_heads", 1, 1024)
    theta, rotary = _rope(text)
    spec = TargetSpec(
        num_layers=text.integer("num_hidden_layers", 1, 1024),
        hidden_size=text.integer("hidden_size", 1, _WIDEST),
        intermediate_size=text.integer("intermediate_size", 1, _WIDEST),
        vocab_size=text.integer("vocab_size", 2, 2**24),
        tie_word_embeddings=_is_tied(top, text),
        max_context=_max_context(text),
        layer_kinds=_layer_kinds(text),
        num_heads=heads,
        num_kv_heads=_divisor(text, "num_key_value_heads", heads),
        head_dim=text.integer("head_dim", 2, 4096) if "head_dim" in text else _head_dim(text, heads),
        attention_bias=text.flag("attention_bias") or False,
        linear_key_heads=_divisor(text, "linear_num_key_heads", value_heads),
        linear_value_heads=value_heads,
        linear_key_dim=text.integer("linear_key_head_dim", 1, 4096),
        linear_value_dim=text.integer("linear_value_head_dim", 1, 4096),
        conv_kernel=text.integer("linear_conv_kernel_dim", 2, 64),
        rms_norm_eps=text.number("rms_norm_eps", 1e-12, 1e-2),
        rope_theta=theta,
        partial_rotary_factor=rotary,
        dtype=dtype,
        quantization=quantization,
        fingerprint=fingerprint,
    )
    _check_fixed(text)
    return spec


def _check_fixed(text: Fields) -> None:
    """What mlx-lm's model class takes for granted."""
    if (text.text("hidden_act") or "silu") != "silu":
        raise text.error("hidden_act", "silu")
    if text.flag("attn_output_gate") is False:
        raise text.error("attn_output_gate", "true")


def _is_tied(top: Fields, text: Fields) -> bool:
    inner, outer = text.flag("tie_word_embeddings"), top.flag("tie_word_embeddings")
    if inner is not None and outer is not None and inner != outer:
        raise text.error("tie_word_embeddings", f"{outer}, as on the top level")
    return inner or outer or False


def _layer_kinds(text: Fields) -> tuple[TargetLayerKind, ...]:
    """mlx-lm builds layers from the interval alone, so ``layer_types`` must say the same."""
    num_layers = text.integer("num_hidden_layers", 1, 1024)
    interval = text.integer("full_attention_interval", 1, 1024) if "full_attention_interval" in text else 4
    kinds = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))
    if text.texts("layer_types") not in (None, kinds):
        raise text.error("layer_types", f"{num_layers} layers, every {interval}th full_attention")
    if "layer_types" not in text and "full_attention_interval" not in text:
        raise text.error("layer_types", "the kind of each layer, or full_attention_interval")
    return tuple(_KINDS[kind] for kind in kinds)


def _divisor(text: Fields, key: str, heads: int) -> int:
    value = text.integer(key, 1, heads)
    if heads % value:
        raise text.error(key, f"a divisor of {heads} heads")
    return value


def _head_dim(text: Fields, heads: int) -> int:
    hidden = text.integer("hidden_size", 1, _WIDEST)
    if hidden % heads:
        raise text.error("head_dim", f"a head size, since {heads} heads do not divide {hidden}")
    return hidden // heads


def _rope(text: Fields) -> tuple[float, float]:
    """Return theta and the rotary fraction; both have defaults in mlx-lm that fit no released model."""
    rope = text.section("rope_parameters")
    kind_key = "rope_type" if "rope_type" in rope else "type"
    if (rope.text(kind_key) or "default") not in _PLAIN_ROPE:
        raise rope.error(kind_key, " or ".join(_PLAIN_ROPE))
    if (scaling := text.section("rope_scaling")).get("rope_type") not in (None, *_PLAIN_ROPE):
        raise scaling.error("rope_type", " or ".join(_PLAIN_ROPE))
    theta = holder("rope_theta", rope, text).number("rope_theta", 1.0, 1e12)
    return theta, holder("partial_rotary_factor", rope, text).number("partial_rotary_factor", 0.01, 1.0)


def _quantization(top: Fields, text: Fields, tensors: Mapping[str, TensorEntry]) -> Quantization | None:
    packed = sorted(name for name in tensors if name.endswith(".scales"))
    if "quantization" not in top:
        for section in (top, text):
            if "quantization_config" in section:
                method = section.section("quantization_config")
                raise method.error(
                    "quant_method", 'no such scheme: MLX affine quantisation ("quantization") or none'
                )
        if packed:
            raise top.error("quantization", f'bits and group size, since tensor "{packed[0]}" is there')
        return None
    section = top.section("quantization")
    for part in (section, *(section.section(key) for key in section if isinstance(section.get(key), dict))):
        if (part.text("mode") or "affine") != "affine":
            raise part.error("mode", "affine")
    if not packed:
        raise top.error("quantization", "no such key, since no tensor is packed")
    return Quantization(section.integer("bits", 2, 8), section.integer("group_size", 32, 128))


def _stored_dtype(path: Path, tensors: Mapping[str, TensorEntry]) -> str:
    for name in (f"{EMBEDDING}.scales", f"{EMBEDDING}.weight"):
        if (entry := tensors.get(name)) is not None and entry.dtype in FLOATS:
            return FLOATS[entry.dtype]
        if entry is not None:
            raise CheckpointError(
                f'{entry.file}: tensor "{name}" has dtype {entry.dtype}; expected {", ".join(FLOATS)}'
            )
    raise CheckpointError(f'{path}: tensor "{EMBEDDING}.weight" is missing; expected a text model')
