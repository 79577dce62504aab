"""Tiny random checkpoints, written as the real ones are: for loader tests and for engine tests.

``write_target`` writes a dense Qwen3.5 text model (in torch's layout or MLX's, also quantised),
``write_drafter`` a DFlash drafter for it in the first release's or today's layout. Same arguments, same
bytes. Weights are scaled so that greedy decoding wanders through the vocabulary instead of repeating itself.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

Weights = dict[str, mx.array]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_target(
    path: Path,
    *,
    num_layers: int = 4,
    hidden: int = 64,
    intermediate: int = 128,
    vocab: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    linear_key_heads: int = 2,
    linear_value_heads: int = 4,
    linear_dim: int = 32,
    interval: int = 4,
    max_context: int = 4096,
    tied: bool = True,
    layout: Literal["torch", "mlx"] = "torch",
    is_wrapped: bool = False,
    quantize: int | None = None,
    group_size: int = 32,
    num_shards: int = 1,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 0,
) -> Path:
    """Write a target and return its directory.

    Every ``interval``-th layer is full attention. ``is_wrapped`` adds a VLM's names, a vision tensor and a
    multi-token-prediction tensor; ``quantize`` is a number of bits and implies MLX's layout.
    """
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "full_attention_interval": interval,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)
        ],
        "linear_num_key_heads": linear_key_heads,
        "linear_num_value_heads": linear_value_heads,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    config: dict[str, Any] = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    config |= {"tie_word_embeddings": tied, "text_config": text}
    weights = _target_weights(text, np.random.default_rng(seed), dtype)
    if layout == "mlx" or quantize is not None:
        weights = _as_mlx(weights)
    elif is_wrapped:
        weights = _as_vlm(weights)
    if quantize is not None:
        weights = _quantized(weights, group_size, quantize)
        config["quantization"] = {"group_size": group_size, "bits": quantize, "mode": "affine"}
        config["quantization_config"] = config["quantization"]
    return _write(path, config, weights, num_shards)


def write_drafter(
    path: Path,
    *,
    target: Path,
    layout: Literal["first", "today"] = "first",
    num_layers: int = 2,
    taps: tuple[int, ...] | None = None,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    sliding_window: int = 16,
    block_size: int = 8,
    mask_token_id: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 1,
) -> Path:
    """Write a drafter for the target at ``target`` and return its directory.

    ``first``: as many taps as layers, all layers full, settings on top. ``today``: one tap more than layers,
    all layers sliding but the last, settings inside ``dflash_config``.
    """
    top = json.loads((target / "config.json").read_text())
    text = top.get("text_config", top)
    hidden, num_target_layers = text["hidden_size"], text["num_hidden_layers"]
    is_today = layout == "today"
    taps = taps or _spread(num_layers + is_today, num_target_layers)
    mask_token_id = text["vocab_size"] - 1 if mask_token_id is None else mask_token_id
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "num_target_layers": num_target_layers,
        "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
    }
    if is_today:
        config["layer_types"] = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
        config |= {"sliding_window": sliding_window, "use_sliding_window": True}
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        config["dflash_config"]["block_size"] = block_size
    else:
        config |= {"rope_theta": 10000.0, "block_size": block_size, "sliding_window": None}
    return _write(path, config, _drafter_weights(config, len(taps), np.random.default_rng(seed), dtype))


def quantize_target(source: Path, path: Path, *, bits: int = 4, group_size: int = 64) -> Path:
    """Write a target of torch's layout once more, quantised, in MLX's layout; weights and config alone."""
    config = json.loads((source / "config.json").read_text())
    weights: Weights = {}
    for file in sorted(source.glob("*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights |= loaded
    config["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    config["quantization_config"] = config["quantization"]
    return _write(path, config, _quantized(_as_mlx(weights), group_size, bits))


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Let ``change`` edit a checkpoint's config in place."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def edit_weights(path: Path, change: Callable[[Weights], object]) -> Path:
    """Let ``change`` edit the tensors of a checkpoint of one file in place."""
    weights = dict(read_weights(path))
    change(weights)
    mx.eval(weights)
    mx.save_safetensors(str(path / WEIGHTS), weights)
    return path


def read_weights(path: Path) -> Weights:
    """Read every tensor of a checkpoint, by its stored name."""
    weights: Weights = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= mx.load(str(file))  # pyright: ignore[reportOperatorIssue]
    return weights


def _spread(count: int, num_target_layers: int) -> tuple[int, ...]:
    """Spread taps over the target's layers, its last one left out."""
    return tuple(round(i * (num_target_layers - 2) / max(count - 1, 1)) for i in range(count))


def _write(path: Path, config: Mapping[str, Any], weights: Weights, num_shards: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if num_shards == 1:
        mx.save_safetensors(str(path / WEIGHTS), weights, metadata={"format": "pt"})
        return path
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::num_shards]}
        mx.save_safetensors(str(path / file), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


class _Draw:
    """Random tensors in one dtype."""

    def __init__(self, rng: np.random.Generator, dtype: mx.Dtype):
        self._rng = rng
        self._dtype = dtype

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> mx.array:
        """Keep the size of what it multiplies, times ``gain``."""
        return self.normal((rows, columns), gain / columns**0.5)

    def normal(self, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> mx.array:
        return mx.array(self._rng.normal(mean, scale, shape).astype(np.float32)).astype(self._dtype)

    def norm(self, size: int, center: float) -> mx.array:
        """Norm weights on a grid on which adding 1.0 is exact in bfloat16."""
        values = np.round(self._rng.uniform(-0.25, 0.25, size) * 128) / 128 + center
        return mx.array(values.astype(np.float32)).astype(self._dtype)


def _target_weights(text: Mapping[str, Any], rng: np.random.Generator, dtype: mx.Dtype) -> Weights:
    draw = _Draw(rng, dtype)
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    weights = {"model.embed_tokens.weight": draw.normal((vocab, hidden), 0.3)}
    for index, kind in enumerate(text["layer_types"]):
        mixer = _linear(text, draw, rng) if kind == "linear_attention" else _attention(text, draw)
        layer = mixer | {
            "mlp.gate_proj.weight": draw.matrix(inner, hidden),
            "mlp.up_proj.weight": draw.matrix(inner, hidden),
            "mlp.down_proj.weight": draw.matrix(hidden, inner, 1.5),
            "input_layernorm.weight": draw.norm(hidden, 0.0),
            "post_attention_layernorm.weight": draw.norm(hidden, 0.0),
        }
        weights |= {f"model.layers.{index}.{name}": array for name, array in layer.items()}
    weights["model.norm.weight"] = draw.norm(hidden, 0.0)
    if not text["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw.normal((vocab, hidden), 0.3)
    return weights


def _linear(text: Mapping[str, Any], draw: _Draw, rng: np.random.Generator) -> Weights:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    conv = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    return {
        "linear_attn.in_proj_qkv.weight": draw.matrix(conv, hidden),
        "linear_attn.in_proj_z.weight": draw.matrix(values, hidden),
        "linear_attn.in_proj_a.weight": draw.matrix(heads, hidden),
        "linear_attn.in_proj_b.weight": draw.matrix(heads, hidden),
        "linear_attn.conv1d.weight": draw.normal((conv, 1, text["linear_conv_kernel_dim"]), 0.6),
        # Decays from nearly 1 (long memory) down to about 0.2.
        "linear_attn.A_log": mx.array(rng.uniform(-3.0, 0.5, heads).astype(np.float32)),
        "linear_attn.dt_bias": draw.normal((heads,), 0.5, mean=-1.0),
        "linear_attn.norm.weight": draw.norm(text["linear_value_head_dim"], 1.0),
        "linear_attn.out_proj.weight": draw.matrix(hidden, values, 1.5),
    }


def _attention(text: Mapping[str, Any], draw: _Draw) -> Weights:
    hidden, size = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    return {
        "self_attn.q_proj.weight": draw.matrix(2 * queries, hidden),
        "self_attn.k_proj.weight": draw.matrix(keys, hidden),
        "self_attn.v_proj.weight": draw.matrix(keys, hidden),
        "self_attn.o_proj.weight": draw.matrix(hidden, queries, 2.0),
        "self_attn.q_norm.weight": draw.norm(size, 0.25),
        "self_attn.k_norm.weight": draw.norm(size, 0.25),
    }


def _drafter_weights(
    config: Mapping[str, Any], num_taps: int, rng: np.random.Generator, dtype: mx.Dtype
) -> Weights:
    draw = _Draw(rng, dtype)
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    weights = {
        "fc.weight": draw.matrix(hidden, num_taps * hidden),
        "hidden_norm.weight": draw.norm(hidden, 1.0),
        "norm.weight": draw.norm(hidden, 1.0),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": draw.matrix(queries, hidden),
            "self_attn.k_proj.weight": draw.matrix(keys, hidden),
            "self_attn.v_proj.weight": draw.matrix(keys, hidden),
            "self_attn.o_proj.weight": draw.matrix(hidden, queries, 3.0),
            "self_attn.q_norm.weight": draw.norm(size, 1.5),
            "self_attn.k_norm.weight": draw.norm(size, 1.5),
            "mlp.gate_proj.weight": draw.matrix(inner, hidden),
            "mlp.up_proj.weight": draw.matrix(inner, hidden),
            "mlp.down_proj.weight": draw.matrix(hidden, inner, 2.0),
            "input_layernorm.weight": draw.norm(hidden, 1.0),
            "post_attention_layernorm.weight": draw.norm(hidden, 1.0),
        }
        weights |= {f"layers.{index}.{name}": array for name, array in layer.items()}
    return weights


def _as_vlm(weights: Weights) -> Weights:
    """Names of a released VLM checkpoint, with tensors that a text server leaves out."""
    renamed = {name.replace("model.", "model.language_model.", 1): array for name, array in weights.items()}
    extra = {"model.visual.patch_embed.weight": mx.zeros((4, 4)), "mtp.fc.weight": mx.zeros((4, 4))}
    return renamed | extra


def _as_mlx(weights: Weights) -> Weights:
    """What mlx-lm writes: its names, its convolution layout, norms around one."""
    zero_centred = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    converted: Weights = {}
    for name, array in weights.items():
        value = array.moveaxis(2, 1) if name.endswith("conv1d.weight") else array
        converted[f"language_model.{name}"] = value + 1.0 if name.endswith(zero_centred) else value
    return converted


def _quantized(weights: Weights, group_size: int, bits: int) -> Weights:
    packed: Weights = {}
    for name, array in weights.items():
        if array.ndim != 2:
            packed[name] = array
            continue
        base = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size=group_size, bits=bits)
        packed |= {
            f"{base}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    return packed
