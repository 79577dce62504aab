"""Loading targets: every form of a dense Qwen3.5 text model loads alike; each misfit is one clear error."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_core.checkpoints import (
    LoadedTarget,
    load_embedding_and_head,
    load_target,
    packing,
    read_target_spec,
)
from dflash_core.checkpoints import target as loading
from dflash_core.checkpoints.dtypes import activation_dtype
from dflash_core.checkpoints.packing import unpacked_bytes
from dflash_core.checkpoints.target_config import read_target_files
from dflash_core.checkpoints.target_spec import Quantization
from dflash_core.checkpoints.target_tensors import text_tensors
from dflash_core.errors import CheckpointError
from dflash_core.pair import TARGET
from tests.core.tiny_checkpoints import Weights, edit_config, edit_weights, read_weights, write_target

Config = dict[str, Any]
Change = Callable[[Any], object]

IDS = mx.array([[5, 99, 200, 7, 7, 42]])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_target(tmp_path / "plain")


def refusal(path: Path) -> str:
    """The error that reading the target ends with; loading it must end with the same."""
    with pytest.raises(CheckpointError) as caught:
        read_target_spec(path)
    message = str(caught.value)
    assert "\n" not in message
    with pytest.raises(CheckpointError) as caught:
        load_target(path)
    assert str(caught.value) == message
    return message


def parameters(target: LoadedTarget) -> Weights:
    return dict(tree_flatten(target.model.parameters()))


def dtypes(target: LoadedTarget) -> dict[str, mx.Dtype]:
    return {name: array.dtype for name, array in parameters(target).items()}


def logits(target: LoadedTarget) -> mx.array:
    return target.model(IDS)


def difference(a: mx.array, b: mx.array) -> float:
    return float(np.abs(np.array(a) - np.array(b)).max())


# What loads


def test_the_embedded_target_loads_in_float32_on_the_cpu():
    target = load_target(TARGET)
    assert target.dtype == mx.float32
    assert set(dtypes(target).values()) == {mx.float32}
    assert target.spec.num_layers == 12
    assert target.spec.layer_kinds == (("linear",) * 3 + ("full",)) * 3
    assert (target.spec.hidden_size, target.spec.vocab_size, target.spec.max_context) == (256, 8192, 8192)
    assert target.spec.tie_word_embeddings
    assert target.spec.dtype == "bfloat16"
    assert sum(array.size for array in parameters(target).values()) == 12_365_064


def test_a_tiny_target_tells_its_shape(plain: Path):
    spec = load_target(plain).spec
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (4, 64, 128, 256)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.linear_key_heads, spec.linear_value_heads, spec.conv_dim) == (2, 4, 256)
    assert (spec.rope_theta, spec.partial_rotary_factor, spec.quantization) == (10000.0, 0.25, None)
    assert pickle.loads(pickle.dumps(spec)) == spec


FORMS: dict[str, Config] = {
    "in MLX's layout": {"layout": "mlx"},
    "wrapped in a VLM": {"is_wrapped": True},
    "in three shards": {"num_shards": 3},
    "in float32": {"dtype": mx.float32},
}


@pytest.mark.parametrize("arguments", FORMS.values(), ids=FORMS)
def test_the_same_model_gives_the_same_logits(arguments: Config, plain: Path, tmp_path: Path):
    reference = logits(load_target(plain))
    other = logits(load_target(write_target(tmp_path / "other", **arguments)))
    assert difference(reference, other) < (0.5 if "dtype" in arguments else 1e-6)


def test_a_flat_text_config_loads_like_a_nested_one(plain: Path):
    reference = logits(load_target(plain))

    def flatten(config: Config) -> None:
        text = config.pop("text_config")
        config |= text | {"model_type": "qwen3_5_text"}

    edit_config(plain, flatten)
    assert mx.array_equal(logits(load_target(plain)), reference)


def test_settings_that_mlx_lm_would_default_are_handed_to_it(plain: Path):
    """Rope on top instead of in ``rope_parameters``, the tie on the outside only, layer types alone."""
    reference = load_target(plain)

    def scatter(config: Config) -> None:
        text = config["text_config"]
        text |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        for key in ("rope_parameters", "tie_word_embeddings", "full_attention_interval"):
            del text[key]

    edit_config(plain, scatter)
    assert mx.array_equal(logits(load_target(plain)), logits(reference))


def test_zero_centred_norms_gain_one_and_converted_norms_do_not(plain: Path, tmp_path: Path):
    stored = read_weights(plain)["model.layers.0.input_layernorm.weight"].astype(mx.float32)
    for path in (plain, write_target(tmp_path / "mlx", layout="mlx")):
        layer = load_target(path).model.language_model.model.layers[0]
        assert mx.array_equal(layer.input_layernorm.weight, stored + 1.0)
        # The gated norm is centred on one in both.
        assert abs(layer.linear_attn.norm.weight.mean().item() - 1.0) < 0.1


def test_an_untied_target_keeps_its_head(tmp_path: Path):
    target = load_target(write_target(tmp_path / "untied", tied=False))
    assert not target.spec.tie_word_embeddings
    assert target.model.language_model.lm_head.weight.shape == (256, 64)


def test_a_tied_targets_copy_of_the_head_is_left_out(plain: Path):
    reference = logits(load_target(plain))
    edit_weights(plain, lambda weights: weights.update({"lm_head.weight": mx.zeros((256, 64))}))
    assert mx.array_equal(logits(load_target(plain)), reference)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_dtype_asked_for_is_given_but_for_the_decay(plain: Path, dtype: mx.Dtype):
    target = load_target(plain, dtype=dtype)
    assert target.dtype == dtype
    for name, found in dtypes(target).items():
        assert found == (mx.float32 if name.endswith("A_log") else dtype), name
    assert target.model.language_model.model.embed_tokens(IDS).dtype == dtype


def test_float64_is_float64_throughout(plain: Path):
    target = load_target(plain, dtype=mx.float64)
    assert set(dtypes(target).values()) == {mx.float64}


def test_a_dtype_that_cannot_run_is_refused(plain: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="int32"):
        load_target(plain, dtype=mx.int32)
    with pytest.raises(ValueError, match="float64"):
        load_target(write_target(tmp_path / "packed", quantize=4), dtype=mx.float64)


def test_on_a_gpu_the_stored_dtype_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for word, dtype in {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}.items():
        assert activation_dtype(word, None) == dtype
    with pytest.raises(ValueError, match="float64"):
        activation_dtype("bfloat16", mx.float64)


# Quantised targets


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 64), (6, 32)])
def test_a_quantised_target_keeps_packed_weights_and_runs_in_float32(
    tmp_path: Path, bits: int, group_size: int
):
    path = write_target(tmp_path / "packed", quantize=bits, group_size=group_size)
    target = load_target(path, packed=True)
    assert target.spec.quantization == Quantization(bits, group_size)
    assert set(dtypes(target).values()) == {mx.float32, mx.uint32}
    attention = target.model.language_model.model.layers[3].self_attn
    assert (attention.q_proj.bits, attention.q_proj.group_size) == (bits, group_size)
    assert logits(target).dtype == mx.float32


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_are_unpacked_on_a_cpu_that_has_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
):
    path = write_target(tmp_path / "packed", quantize=4, tied=tied)
    target, packed = load_target(path), load_target(path, packed=True)
    assert set(dtypes(target).values()) == {mx.float32}
    assert mx.abs(logits(target) - logits(packed)).max() < 1e-4
    spec, files = read_target_files(path)
    stored = sum(cast(mx.array, array).nbytes for _, array in tree_flatten(target.model.parameters()))
    assert unpacked_bytes(spec, text_tensors(files.tensors)) == stored

    monkeypatch.setattr(packing, "free_bytes", lambda: stored)
    assert mx.uint32 in dtypes(load_target(path)).values()
    monkeypatch.setattr(packing, "free_bytes", lambda: 2 * stored)
    assert mx.uint32 not in dtypes(load_target(path)).values()


def test_eight_bits_stay_close_to_full_precision(plain: Path, tmp_path: Path):
    packed = load_target(write_target(tmp_path / "packed", quantize=8))
    reference = logits(load_target(plain))
    assert mx.abs(logits(packed) - reference).mean() < 0.1 * mx.std(reference)


def test_tensors_of_other_bits_than_declared_are_told_by_their_shapes(tmp_path: Path):
    path = write_target(tmp_path / "mixed", quantize=4)
    eight = read_weights(write_target(tmp_path / "eight", quantize=8))
    base = "language_model.model.layers.0.mlp.up_proj"
    edit_weights(path, lambda weights: weights.update({k: v for k, v in eight.items() if k.startswith(base)}))
    mlp = load_target(path, packed=True).model.language_model.model.layers[0].mlp
    assert (mlp.up_proj.bits, mlp.down_proj.bits) == (8, 4)


def test_what_mlx_lm_quantises_and_saves_loads_bit_for_bit(plain: Path, tmp_path: Path):
    utils = pytest.importorskip("mlx_lm.utils")
    model, config = utils.load_model(plain)
    model, config = utils.quantize_model(model, config, 32, 4)
    utils.save_model(tmp_path / "saved", model)
    utils.save_config(config, tmp_path / "saved" / "config.json")
    saved, ours = load_target(tmp_path / "saved"), load_target(write_target(tmp_path / "ours", quantize=4))
    assert mx.array_equal(logits(saved), logits(ours))


# Embedding and head alone

EMBEDDINGS: dict[str, Config] = {
    "tied": {},
    "untied": {"tied": False},
    "wrapped": {"is_wrapped": True},
    "4-bit": {"quantize": 4},
    "8-bit untied": {"quantize": 8, "tied": False, "group_size": 64},
    "sharded": {"num_shards": 3, "tied": False},
}


@pytest.mark.parametrize("packed", [None, True])
@pytest.mark.parametrize("arguments", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embedding_and_head_alone_equal_the_whole_targets(
    arguments: Config, packed: bool | None, tmp_path: Path
):
    path = write_target(tmp_path / "target", **arguments)
    target, borrowed = load_target(path, packed=packed), load_embedding_and_head(path, packed=packed)
    text = target.model.language_model
    assert borrowed.spec == target.spec
    assert borrowed.dtype == target.dtype
    embedded = borrowed.embed(IDS)
    assert mx.array_equal(embedded, text.model.embed_tokens(IDS))
    project = text.model.embed_tokens.as_linear if target.spec.tie_word_embeddings else text.lm_head
    assert mx.array_equal(borrowed.logits(embedded), project(embedded))
    assert borrowed.logits(embedded).shape == (1, 6, 256)


def test_embedding_and_head_leave_the_other_tensors_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = write_target(tmp_path / "target", vocab=64, hidden=64, intermediate=16384)
    active = mx.get_active_memory()
    borrowed = load_embedding_and_head(path)
    assert mx.get_active_memory() - active < 2 * 64 * 64 * 4
    assert borrowed.embedding.weight.shape == (64, 64)


# What the config may not say


def text(**changes: Any) -> Change:
    return lambda config: config["text_config"].update(changes)


def top(**changes: Any) -> Change:
    return lambda config: config.update(changes)


CONFIG_CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no model type": (lambda config: config.pop("model_type"), ('"model_type" is missing', "qwen3_5")),
    "another model": (top(model_type="llama"), ("\"model_type\" is 'llama'", "qwen3_5_text")),
    "a mixture by its model type": (top(model_type="qwen3_5_moe"), ("qwen3_5_moe", "dense")),
    "a mixture by its text type": (text(model_type="qwen3_5_moe_text"), ("text_config.model_type", "dense")),
    "a mixture by its experts": (text(num_experts=64), ("text_config.num_experts", "is 64", "dense")),
    "custom code": (top(model_file="model.py"), ('"model_file"', "'model.py'", "custom code")),
    "quantised activations": (top(quantize_activations=True), ('"quantize_activations"',)),
    "a missing size": (text(hidden_size=None), ('"text_config.hidden_size" is missing', "an integer")),
    "a missing context length": (text(max_position_embeddings=None), ("max_position_embeddings", "missing")),
    "a missing rope theta": (text(rope_parameters={}), ("rope_theta", "is missing")),
    "a missing rotary fraction": (
        text(rope_parameters={"rope_theta": 1e4}),
        ("partial_rotary_factor", "missing"),
    ),
    "an unsupported rope": (
        text(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ("rope_parameters.rope_type", "'yarn'", "default"),
    ),
    "a scaled rope": (text(rope_scaling={"rope_type": "dynamic"}), ("rope_scaling.rope_type", "'dynamic'")),
    "another activation": (text(hidden_act="gelu"), ("hidden_act", "'gelu'", "silu")),
    "no output gate": (text(attn_output_gate=False), ("attn_output_gate", "False", "true")),
    "layer types against the interval": (text(full_attention_interval=2), ("layer_types", "every 2th")),
    "heads that do not divide": (
        text(num_key_value_heads=3),
        ("num_key_value_heads", "is 3", "divisor of 4"),
    ),
    "key heads that do not divide": (text(linear_num_key_heads=3), ("linear_num_key_heads", "divisor of 4")),
    "a tie that is half tied": (text(tie_word_embeddings=False), ("tie_word_embeddings", "False", "True")),
    "NaN": (text(rms_norm_eps=float("nan")), ("text_config.rms_norm_eps", "nan", "finite")),
    "a huge size": (text(vocab_size=10**11), ("text_config.vocab_size", "100000000000")),
    "a foreign quantisation": (
        top(quantization_config={"quant_method": "fp8"}),
        ('"quantization_config.quant_method"', "'fp8'", "affine"),
    ),
    "a quantisation without packed tensors": (
        top(quantization={"bits": 4, "group_size": 32}),
        ('"quantization"', "no tensor is packed"),
    ),
}


@pytest.mark.parametrize(("change", "parts"), CONFIG_CASES.values(), ids=CONFIG_CASES)
def test_a_config_is_refused_for(change: Change, parts: tuple[str, ...], plain: Path):
    edit_config(plain, change)
    message = refusal(plain)
    for part in (str(plain / "config.json"), *parts):
        assert part in message


def test_another_quantisation_mode_is_refused(tmp_path: Path):
    path = write_target(tmp_path / "packed", quantize=4)
    edit_config(path, lambda config: config["quantization"].update(mode="mxfp4"))
    assert "\"quantization.mode\" is 'mxfp4'; expected affine" in refusal(path)


def test_another_mode_of_a_single_tensor_is_refused(tmp_path: Path):
    path = write_target(tmp_path / "packed", quantize=4)
    edit_config(path, lambda config: config["quantization"].update({"lm_head": {"mode": "nvfp4"}}))
    assert '"quantization.lm_head.mode"' in refusal(path)


def test_packed_tensors_without_a_declared_quantisation_are_refused(tmp_path: Path):
    path = write_target(tmp_path / "packed", quantize=4)

    def forget(config: Config) -> None:
        del config["quantization"], config["quantization_config"]

    edit_config(path, forget)
    assert '"quantization" is missing' in refusal(path)


def test_a_foreign_quantisation_file_is_refused(plain: Path):
    (plain / "hf_quant_config.json").write_text("{}")
    assert "hf_quant_config.json" in refusal(plain)


# What the files may not be

NAME = "model.layers.0.linear_attn.in_proj_z.weight"
TENSOR_CASES: dict[str, tuple[Callable[[Weights], object], tuple[str, ...]]] = {
    "missing": (lambda w: w.pop(NAME), (NAME, "missing", "[128, 64]")),
    "extra": (
        lambda w: w.update({"model.layers.4.mlp.up_proj.weight": mx.ones((2, 2))}),
        ("model.layers.4",),
    ),
    "an expert": (
        lambda w: w.update({"model.layers.0.mlp.experts.0.w": mx.ones((2, 2))}),
        ("experts", "dense"),
    ),
    "misshapen": (lambda w: w.update({NAME: mx.ones((128, 32))}), (NAME, "[128, 32]", "[128, 64]")),
    "of an integer dtype": (
        lambda w: w.update({NAME: mx.ones((128, 64), dtype=mx.int8)}),
        (NAME, "I8", "BF16"),
    ),
    "an embedding of an integer dtype": (
        lambda w: w.update({"model.embed_tokens.weight": mx.ones((256, 64), dtype=mx.int8)}),
        ("model.embed_tokens.weight", "I8"),
    ),
    "a missing embedding": (lambda w: w.pop("model.embed_tokens.weight"), ("model.embed_tokens", "missing")),
    "given twice": (
        lambda w: w.update({f"language_model.{NAME}": mx.ones((128, 64))}),
        (NAME, "second", "expected one"),
    ),
    "a convolution in another layout than the rest": (
        lambda w: w.update({"model.layers.1.linear_attn.conv1d.weight": mx.ones((256, 4, 1))}),
        ("two layouts", "[256, 1, 4]", "[256, 4, 1]"),
    ),
    "a misshapen convolution": (
        lambda w: w.update({"model.layers.1.linear_attn.conv1d.weight": mx.ones((256, 1, 3))}),
        ("conv1d", "[256, 1, 3]", "[256, 1, 4]"),
    ),
}


@pytest.mark.parametrize(("change", "parts"), TENSOR_CASES.values(), ids=TENSOR_CASES)
def test_a_tensor_is_refused_that_is(
    change: Callable[[Weights], object], parts: tuple[str, ...], plain: Path
):
    edit_weights(plain, change)
    message = refusal(plain)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_packed_parts_that_do_not_fit_each_other_are_refused(tmp_path: Path, part: str):
    path = write_target(tmp_path / "packed", quantize=4)
    base = "language_model.model.layers.0.mlp.up_proj"

    def cut(weights: Weights) -> None:
        weights[f"{base}.{part}"] = weights[f"{base}.{part}"][:, :1]

    edit_weights(path, cut)
    assert "model.layers.0.mlp.up_proj.weight" in refusal(path)


def test_a_packed_tensor_without_biases_is_refused(tmp_path: Path):
    path = write_target(tmp_path / "packed", quantize=4)
    edit_weights(path, lambda weights: weights.pop("language_model.model.layers.0.mlp.up_proj.biases"))
    assert "model.layers.0.mlp.up_proj.biases" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("part", ["up_proj.weight", "up_proj.scales", "up_proj.biases"])
def test_a_value_that_is_not_finite_is_refused_by_its_tensors_name(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, value: float
):
    """It would load, and every request would fail."""
    monkeypatch.setattr(loading, "_LOOKED_AT", 100)  # the value is in a later part than the first
    path = plain if part.endswith("weight") else write_target(tmp_path / "packed", quantize=4)

    def poison(weights: Weights) -> None:
        (name,) = (name for name in weights if name.endswith(f"layers.0.mlp.{part}"))
        weights[name][-1, -1] = value

    edit_weights(path, poison)
    with pytest.raises(CheckpointError, match=rf'layers\.0\.mlp\.{part}" has a value that is NaN'):
        load_target(path)


def test_a_truncated_shard_is_refused(tmp_path: Path):
    path = write_target(tmp_path / "target", num_shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    message = refusal(path)
    assert str(shard) in message
    assert "truncated" in message


def test_a_shard_missing_against_the_index_is_named(tmp_path: Path):
    path = write_target(tmp_path / "target", num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: no such shard" in refusal(path)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path):
    path = write_target(tmp_path / "target", num_shards=2)
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(values))
    assert "'../secret.safetensors'" in refusal(path)


def test_a_directory_of_pickles_is_refused(plain: Path):
    (plain / "model.safetensors").rename(plain / "pytorch_model.bin")
    assert "pickle" in refusal(plain)


def test_missing_files_are_named(plain: Path, tmp_path: Path):
    (plain / "model.safetensors").unlink()
    assert "no weights" in refusal(plain)
    (plain / "config.json").unlink()
    assert "config.json: no such file" in refusal(plain)
    assert "no such directory" in refusal(tmp_path / "nowhere")


def test_a_malformed_config_is_refused(plain: Path):
    (plain / "config.json").write_text("{")
    assert "malformed JSON" in refusal(plain)


def test_a_library_that_gives_up_is_one_clear_error(plain: Path, monkeypatch: pytest.MonkeyPatch):
    utils = pytest.importorskip("mlx_lm.utils")

    def give_up(*arguments: object, **options: object) -> object:
        raise ValueError("Received 3 parameters not in model:\nmodel.x,\nmodel.y")

    monkeypatch.setattr(utils, "load_model", give_up)
    with pytest.raises(CheckpointError, match=r"mlx-lm cannot build this model \(ValueError\)$"):
        load_target(plain)


def test_a_fingerprint_is_stable_and_sees_config_shapes_and_weights(tmp_path: Path):
    def fingerprint(name: str, **arguments: Any) -> str:
        return read_target_spec(write_target(tmp_path / name, **arguments)).fingerprint

    base = fingerprint("base")
    assert fingerprint("same") == base
    others = {fingerprint("a", seed=1), fingerprint("b", max_context=64), fingerprint("c", num_shards=2)}
    assert len(others | {base}) == 4
