"""The strict reader of DFlash drafters: both public layouts load, and each misfit is one clear error."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_core.checkpoints import load_drafter_weights, read_drafter_spec, read_target_spec
from dflash_core.checkpoints.drafter_config import parse_drafter_config
from dflash_core.checkpoints.drafter_spec import DrafterSpec, RopeScaling
from dflash_core.checkpoints.drafter_tensors import expected_tensors
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.errors import CheckpointError
from dflash_core.pair import DRAFTER, TARGET
from tests.core.tiny_checkpoints import (
    Weights,
    edit_config,
    edit_weights,
    read_weights,
    write_drafter,
    write_target,
)

Config = dict[str, Any]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> TargetSpec:
    return read_target_spec(target_path)


@pytest.fixture
def first(tmp_path: Path, target_path: Path) -> Path:
    return write_drafter(tmp_path / "first", target=target_path, layout="first")


@pytest.fixture
def today(tmp_path: Path, target_path: Path) -> Path:
    return write_drafter(tmp_path / "today", target=target_path, layout="today", num_layers=3, taps=(0, 2))


def refusal(path: Path, target: TargetSpec | None) -> str:
    """The error that reading the drafter ends with."""
    with pytest.raises(CheckpointError) as caught:
        read_drafter_spec(path, target)
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


# What loads


def test_the_first_layout_reads_as_all_full_layers_that_are_not_causal(first: Path, target: TargetSpec):
    spec = read_drafter_spec(first, target)
    assert spec.layer_kinds == ("full", "full")
    assert spec.is_causal == (False, False)
    assert spec.sliding_window is None
    assert (spec.taps, spec.block_size, spec.mask_token_id) == ((0, 2), 8, 255)
    assert (spec.dtype, spec.rope_theta, spec.rope_scaling) == ("bfloat16", 10000.0, None)


def test_todays_layout_reads_as_sliding_causal_layers_and_one_full_layer(today: Path, target: TargetSpec):
    spec = read_drafter_spec(today, target)
    assert spec.layer_kinds == ("sliding", "sliding", "full")
    assert spec.is_causal == (True, True, False)
    assert spec.sliding_window == 16
    assert (spec.taps, spec.block_size) == ((0, 2), 8)


def test_a_drafter_reads_without_its_target(first: Path, target: TargetSpec):
    assert read_drafter_spec(first, None) == read_drafter_spec(first, target)


def test_the_embedded_drafter_reads_and_loads_in_the_targets_dtype():
    spec = read_drafter_spec(DRAFTER, read_target_spec(TARGET))
    assert (spec.taps, spec.block_size, spec.mask_token_id) == ((1, 5, 9), 16, 3)
    weights = load_drafter_weights(DRAFTER, spec, mx.float32)
    assert sum(weight.size for weight in weights.values()) == 2_558_336
    assert {weight.dtype for weight in weights.values()} == {mx.float32}
    assert weights["fc.weight"].shape == (256, 3 * 256)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_weights_come_in_the_dtype_asked_for(today: Path, target: TargetSpec, dtype: mx.Dtype):
    weights = load_drafter_weights(today, read_drafter_spec(today, target), dtype)
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert mx.array_equal(weights["fc.weight"], read_weights(today)["fc.weight"].astype(dtype))


def test_a_model_prefix_and_a_borrowed_embedding_are_dropped(first: Path, target: TargetSpec):
    plain = load_drafter_weights(first, read_drafter_spec(first, target), mx.float32)

    def export(weights: Weights) -> None:
        for name in list(weights):
            weights[f"model.{name}"] = weights.pop(name)
        weights["model.embed_tokens.weight"] = mx.full((256, 64), float("nan"))
        weights["lm_head.weight"] = mx.zeros((256, 64))

    edit_weights(first, export)
    loaded = load_drafter_weights(first, read_drafter_spec(first, target), mx.float32)
    assert set(loaded) == set(plain)
    assert all(mx.array_equal(loaded[name], plain[name]) for name in plain)


def test_harmless_keys_and_nulls_are_let_through(first: Path, target: TargetSpec):
    plain = read_drafter_spec(first, target)
    extra = {
        "transformers_version": "4.57.0",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "foo": None,
    }
    edit_config(first, lambda config: config.update(extra))
    assert read_drafter_spec(first, target) == replace(
        plain, fingerprint=read_drafter_spec(first, target).fingerprint
    )


def test_reading_needs_no_mlx():
    code = (
        "import sys\n"
        "from dflash_core.checkpoints import read_drafter_spec, read_target_spec\n"
        "from dflash_core.checkpoints import resolve_drafter, resolve_target\n"
        "read_drafter_spec(resolve_drafter('embedded'), read_target_spec(resolve_target('embedded')))\n"
        "assert not {'mlx.core', 'mlx_lm', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# Settings that may lie in two places


def released(**changes: Any) -> Config:
    """The 4B drafter's config of today, as far as it is known."""
    config: Config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "num_target_layers": 32,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 4096,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29],
        },
    }
    return config | changes


def first_release() -> Config:
    """The 4B drafter's config of its first release, settings on top."""
    config = released(intermediate_size=9728, num_hidden_layers=5, block_size=16, mask_token_id=248070)
    config["target_layer_ids"] = [1, 8, 15, 22, 29]
    for key in ("layer_types", "sliding_window", "dflash_config"):
        del config[key]
    return config


def parse(config: Config) -> DrafterSpec:
    return parse_drafter_config(config, "config.json")


@pytest.mark.parametrize(
    ("config", "num_tensors", "num_parameters"),
    [(released(), 69, 634_425_856), (first_release(), 58, 537_427_200)],
    ids=["today", "first"],
)
def test_the_released_shapes_add_up_to_the_released_parameter_counts(
    config: Config, num_tensors: int, num_parameters: int
):
    table = expected_tensors(parse(config))
    assert len(table) == num_tensors
    assert sum(prod(shape) for shape in table.values()) == num_parameters


def test_taps_and_layers_are_independent():
    spec = parse(released())
    assert (spec.num_layers, len(spec.taps), spec.feature_size) == (6, 8, 20480)


def test_the_nested_setting_wins_over_the_one_on_top():
    nested = released()["dflash_config"]
    config = released(block_size=4, mask_token_id=7, target_layer_ids=[3], dflash_config=nested)
    spec = parse(config)
    assert (spec.block_size, spec.mask_token_id, spec.taps[0]) == (16, 248077, 1)


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        ({}, {}, (True,) * 5 + (False,)),
        ({}, {"causal": False}, (False,) * 6),
        ({}, {"causal": True}, (True,) * 6),
        ({"is_causal": False}, {"causal": True}, (False,) * 6),
        ({"is_causal": True}, {"causal": False}, (True,) * 6),
    ],
)
def test_causality_is_taken_from_the_top_then_nested_then_from_each_layers_kind(
    top: Config, nested: Config, expected: tuple[bool, ...]
):
    config = released(**top)
    config["dflash_config"] = config["dflash_config"] | nested
    assert parse(config).is_causal == expected


def test_the_window_may_be_nested():
    config = released(sliding_window=None)
    config["dflash_config"] = config["dflash_config"] | {"use_swa": True, "swa_window_size": 2048}
    assert parse(config).sliding_window == 2048


def test_rope_may_be_given_as_parameters_and_stretched():
    stretch = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 65536}
    spec = parse(released(rope_theta=None, rope_parameters={"rope_theta": 5000.0, **stretch}))
    assert spec.rope_theta == 5000.0
    assert spec.rope_scaling == RopeScaling("yarn", 4.0, 65536)
    assert parse(released(rope_scaling={"type": "linear", "factor": 2.0})).rope_scaling == RopeScaling(
        "linear", 2.0
    )
    assert parse(released(rope_scaling={"rope_type": "default"})).rope_scaling is None


def test_softcap_and_embedding_scale_are_read():
    spec = parse(released(final_logit_softcapping=30.0, input_embedding_scale=45.25))
    assert (spec.final_logit_softcap, spec.embedding_scale) == (30.0, 45.25)


# What the config may not say: each case edits a released config and names parts of the error.


def nested(**changes: Any) -> Config:
    return {"dflash_config": released()["dflash_config"] | changes}


CONFIG_CASES: dict[str, tuple[Config, tuple[str, ...]]] = {
    "an unknown key": ({"attention_gate": "sigmoid"}, ('"attention_gate"', "'sigmoid'", "no such key")),
    "an unknown nested key": (nested(depth=3), ('"dflash_config.depth"', "is 3", "no such key")),
    "a missing key": ({"intermediate_size": None}, ('"intermediate_size"', "is missing", "an integer")),
    "a missing head_dim": ({"head_dim": None}, ('"head_dim"', "is missing")),
    "missing taps": (nested(target_layer_ids=None), ('"target_layer_ids"', "is missing")),
    "a missing mask token": (nested(mask_token_id=None), ('"mask_token_id"', "is missing")),
    "a missing block size": (nested(block_size=None), ('"block_size"', "is missing")),
    "a missing rope theta": ({"rope_theta": None}, ('"rope_theta"', "is missing")),
    "no architecture": ({"architectures": None}, ('"architectures"', "DFlashDraftModel")),
    "another architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        ("LlamaForCausalLM", "DFlashDraftModel"),
    ),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, ("DFlash2DraftModel", "DFlash 2", "not served")),
    "DFlash 2 by a key": (nested(selector_top_k=16), ("selector_top_k", "is 16", "DFlash 2")),
    "DSpark": ({"architectures": ["DSparkDraftModel"]}, ("DSparkDraftModel", "DSpark drafter", "not served")),
    "DSpark by a key": ({"markov_rank": 256}, ('"markov_rank"', "is 256", "DSpark")),
    "a speculators export": (
        {"eagle_aux_hidden_state_layer_ids": [2, 6]},
        ('"eagle_aux_hidden_state_layer_ids"', "[2, 6]", "speculators"),
    ),
    "a MiMo export": (nested(attention_sink_bias=True), ("attention_sink_bias", "MiMo")),
    "a reduced vocabulary": ({"draft_vocab_size": 32000}, ('"draft_vocab_size"', "32000", "speculators")),
    "quantised weights": ({"quantization": {"bits": 4}}, ('"quantization"', "no such key")),
    "unsorted taps": (nested(target_layer_ids=[5, 1, 9]), ("[5, 1, 9]", "ascending")),
    "a tap given twice": (nested(target_layer_ids=[1, 5, 5]), ("[1, 5, 5]", "each once")),
    "a negative tap": (nested(target_layer_ids=[-1, 5]), ("[-1, 5]", "from 0")),
    "no taps": (nested(target_layer_ids=[]), ("target_layer_ids", "[]", "a list of integers")),
    "taps that are no integers": (
        nested(target_layer_ids=[1.0, True]),
        ("[1.0, True]", "a list of integers"),
    ),
    "the last layer tapped": (nested(target_layer_ids=[1, 31]), ("[1, 31]", "0 to 30", "never tapped")),
    "a tap outside the target": (nested(target_layer_ids=[1, 40]), ("[1, 40]", "0 to 30")),
    "a mask token outside the vocabulary": (
        nested(mask_token_id=248320),
        ("mask_token_id", "248320", "248319"),
    ),
    "a negative mask token": (nested(mask_token_id=-1), ("mask_token_id", "is -1")),
    "a block of one": (nested(block_size=1), ("block_size", "is 1", "from 2 to 128")),
    "an absurd block": (nested(block_size=4096), ("block_size", "is 4096", "from 2 to 128")),
    "a boolean for a number": ({"num_hidden_layers": True}, ("num_hidden_layers", "is True", "an integer")),
    "a string for a number": ({"hidden_size": "2560"}, ("hidden_size", "'2560'", "an integer")),
    "a huge size": ({"intermediate_size": 10**12}, ("intermediate_size", "1000000000000", "1048576")),
    "an odd head": ({"head_dim": 127}, ("head_dim", "127", "even")),
    "heads that do not divide": (
        {"num_key_value_heads": 5},
        ("num_key_value_heads", "is 5", "divisor of 32"),
    ),
    "a wrong number of layer types": ({"layer_types": ["full_attention"]}, ("layer_types", "6 of")),
    "an unknown layer type": (
        {"layer_types": ["chunked_attention"] * 6},
        ("chunked_attention", "sliding_attention"),
    ),
    "sliding layers without a window": ({"sliding_window": None}, ("sliding_window", "is missing")),
    "sliding layers switched off": ({"use_sliding_window": False}, ("use_sliding_window", "False", "true")),
    "sliding without layer types": (
        {"layer_types": None, "use_sliding_window": True},
        ("use_sliding_window", "layer_types"),
    ),
    "MiMo's sliding of full layers": (
        {"layer_types": ["full_attention"] * 6} | nested(use_swa=True, swa_window_size=64),
        ("use_swa", "layer_types"),
    ),
    "a causality that is no flag": ({"is_causal": 1}, ("is_causal", "is 1", "true or false")),
    "another activation": ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "silu")),
    "interleaved rope": ({"rope_is_neox_style": False}, ("rope_is_neox_style", "interleaved")),
    "an unsupported rope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
        ('"rope_scaling.rope_type"', "'longrope'", "default, linear or yarn"),
    ),
    "an unsupported rope setting": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32}},
        ('"rope_scaling.beta_fast"', "no such key"),
    ),
    "two rope thetas": ({"rope_parameters": {"rope_theta": 10.0}}, ('"rope_theta"', "10000000", "is")),
    "a part of the head turned": (
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        ("partial_rotary_factor", "0.25", "1.0"),
    ),
    "an output multiplier": (nested(output_multiplier=0.5), ("output_multiplier", "0.5", "1.0")),
    "an epsilon of nothing": ({"rms_norm_eps": 0.0}, ("rms_norm_eps", "0.0", "a number")),
    "a section that is no object": ({"dflash_config": [1]}, ('"dflash_config"', "[1]", "an object")),
}


@pytest.mark.parametrize(("changes", "parts"), CONFIG_CASES.values(), ids=CONFIG_CASES)
def test_a_config_is_refused_for(changes: Config, parts: tuple[str, ...], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(released(**changes)))
    message = refusal(tmp_path, None)
    for part in (str(tmp_path / "config.json"), *parts):
        assert part in message


# What does not fit the target


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_size": 128}, ('"hidden_size" is 64', "expected 128")),
        ({"vocab_size": 512}, ('"vocab_size" is 256', "expected 512")),
        ({"num_layers": 8}, ('"num_target_layers" is 4', "expected 8")),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    first: Path, target: TargetSpec, change: Config, parts: tuple[str, ...]
):
    message = refusal(first, replace(target, **change))
    for part in parts:
        assert part in message


def test_the_targets_own_depth_bounds_the_taps(first: Path, target: TargetSpec):
    edit_config(first, lambda config: config.pop("num_target_layers"))
    assert read_drafter_spec(first, target).taps == (0, 2)
    assert "0 to 1" in refusal(first, replace(target, num_layers=3))


# What the files may not be


def rename(old: str, new: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[new] = weights.pop(old)

    return change


TENSOR_CASES: dict[str, tuple[Callable[[Weights], object], tuple[str, ...]]] = {
    "missing": (
        lambda w: w.pop("layers.1.mlp.up_proj.weight"),
        ('"layers.1.mlp.up_proj.weight"', "[96, 64]"),
    ),
    "extra": (
        lambda w: w.update({"layers.2.norm.weight": mx.ones(64)}),
        ('"layers.2.norm.weight"', "2 layers"),
    ),
    "misspelt": (rename("norm.weight", "final_norm.weight"), ('"norm.weight"', "missing")),
    "misshapen": (lambda w: w.update({"norm.weight": mx.ones(32)}), ('"norm.weight"', "[32]", "[64]")),
    "fc of another number of taps": (
        lambda w: w.update({"fc.weight": mx.ones((64, 192))}),
        ('"fc.weight"', "[64, 192]", "[64, 128]", "2 taps of 64"),
    ),
    "of an integer dtype": (
        lambda w: w.update({"norm.weight": mx.ones(64, dtype=mx.int32)}),
        ('"norm.weight"', "I32", "BF16"),
    ),
    "given twice": (lambda w: w.update({"model.norm.weight": mx.ones(64)}), ('"model.norm.weight"', "once")),
    "of a DSpark head": (lambda w: w.update({"markov_head.w1": mx.ones(4)}), ("markov_head", "DSpark")),
    "of DFlash 2": (
        lambda w: w.update({"candidate_selector.successor_codebook": mx.ones(4)}),
        ("candidate_selector", "DFlash 2"),
    ),
    "of a reduced vocabulary": (lambda w: w.update({"d2t": mx.zeros(8)}), ('"d2t"', "speculators")),
    "a mask embedding": (lambda w: w.update({"mask_embedding": mx.zeros(64)}), ("mask_embedding", "MiMo")),
    "an attention sink": (
        lambda w: w.update({"layers.0.self_attn.attention_sink_bias": mx.zeros(4)}),
        ("attention_sink_bias", "MiMo"),
    ),
}


@pytest.mark.parametrize(("change", "parts"), TENSOR_CASES.values(), ids=TENSOR_CASES)
def test_a_tensor_is_refused_that_is(
    change: Callable[[Weights], object], parts: tuple[str, ...], first: Path, target: TargetSpec
):
    edit_weights(first, change)
    message = refusal(first, target)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_its_tensors_name(
    first: Path, target: TargetSpec, value: float
):
    def poison(weights: Weights) -> None:
        weights["layers.0.mlp.up_proj.weight"][3, 5] = value

    edit_weights(first, poison)
    spec = read_drafter_spec(first, target)
    with pytest.raises(CheckpointError, match=r'"layers\.0\.mlp\.up_proj\.weight" has a value that is NaN'):
        load_drafter_weights(first, spec, mx.float32)


def test_a_weight_that_overflows_the_dtype_asked_for_is_refused(first: Path, target: TargetSpec):
    def enlarge(weights: Weights) -> None:
        weights["fc.weight"][0, 0] = 1e30

    edit_weights(first, enlarge)
    spec = read_drafter_spec(first, target)
    load_drafter_weights(first, spec, mx.float32)
    with pytest.raises(CheckpointError, match=r'"fc\.weight".*float16'):
        load_drafter_weights(first, spec, mx.float16)


def test_weights_that_changed_since_the_spec_was_read_are_refused(first: Path, target: TargetSpec):
    spec = read_drafter_spec(first, target)
    edit_weights(first, lambda weights: weights.pop("norm.weight"))
    with pytest.raises(CheckpointError, match=r'"norm\.weight" is missing'):
        load_drafter_weights(first, spec, mx.float32)


def test_a_truncated_file_is_refused(first: Path, target: TargetSpec):
    file = first / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in refusal(first, target)


@pytest.mark.parametrize("keep", [0, 5, 8, 200])
def test_a_file_cut_inside_its_header_is_refused(first: Path, target: TargetSpec, keep: int):
    file = first / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated inside its header" in refusal(first, target)


def test_a_git_lfs_pointer_is_refused_as_what_it_is(first: Path, target: TargetSpec):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (first / "model.safetensors").write_text(pointer)
    assert "Git LFS pointer" in refusal(first, target)


def test_a_file_that_is_no_safetensors_is_refused(first: Path, target: TargetSpec):
    (first / "model.safetensors").write_bytes(b"\xff" * 1000)
    assert "expected a safetensors file" in refusal(first, target)


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes; expected 8"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "expected dtype, shape"),
        ({"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}, "'Q9'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "expected the next tensor at 0"),
        ("nothing", "expected dtype, shape"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(first: Path, target: TargetSpec, entry: object, part: str):
    header = json.dumps({"norm.weight": entry}).encode()
    (first / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert part in refusal(first, target)


def test_trailing_data_is_refused(first: Path, target: TargetSpec):
    with (first / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "its header describes only" in refusal(first, target)


def test_missing_weights_are_named(first: Path, target: TargetSpec):
    (first / "model.safetensors").unlink()
    assert "no weights" in refusal(first, target)


def test_a_pickle_is_never_opened(first: Path, target: TargetSpec):
    (first / "model.safetensors").unlink()
    (first / "pytorch_model.bin").write_bytes(pickle.dumps({"norm.weight": 1}))
    message = refusal(first, target)
    assert "pytorch_model.bin" in message
    assert "pickle" in message


def test_a_missing_config_is_named(first: Path, target: TargetSpec):
    (first / "config.json").unlink()
    assert "config.json: no such file" in refusal(first, target)


def test_a_missing_directory_is_named(tmp_path: Path, target: TargetSpec):
    assert "no such directory" in refusal(tmp_path / "nowhere", target)


JSON_CASES = {
    "malformed": (b'{"hidden_size": 64,', "malformed JSON at line 1"),
    "not an object": (b"[1, 2]", "a JSON list"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "too deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a key given twice": (b'{"hidden_size": 1, "hidden_size": 2}', '"hidden_size" is given twice'),
    "NaN": (b'{"rope_theta": NaN}', '"rope_theta" is nan'),
    "infinity": (b'{"a": {"b": [0, -Infinity]}}', '"a.b[1]" is -inf'),
    "a float too large": (b'{"rope_theta": 1e400}', '"rope_theta" is inf'),
    "an integer too large": (b'{"hidden_size": ' + b"9" * 5000 + b"}", '"hidden_size" is inf'),
    "a huge file": (b'{"a": "' + b"x" * 2**25 + b'"}', "larger than"),
}


@pytest.mark.parametrize(("content", "part"), JSON_CASES.values(), ids=JSON_CASES)
def test_a_config_file_is_refused_that_is(content: bytes, part: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(content)
    assert part in refusal(tmp_path, None)


# Shards


@pytest.fixture
def sharded(first: Path) -> Path:
    """The first drafter in two shards with an index."""
    weights = read_weights(first)
    names = sorted(weights)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map: dict[str, str] = {}
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        mx.save_safetensors(str(first / file), {name: weights[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (first / "model.safetensors").unlink()
    (first / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return first


def edit_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_shards_load_like_one_file(sharded: Path, target: TargetSpec):
    spec = read_drafter_spec(sharded, target)
    assert set(load_drafter_weights(sharded, spec, mx.float32)) == set(expected_tensors(spec))


@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_shard_is_named(sharded: Path, target: TargetSpec, has_index: bool):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    if not has_index:
        (sharded / "model.safetensors.index.json").unlink()
    message = refusal(sharded, target)
    assert "model-00002-of-00002.safetensors: no such shard" in message


@pytest.mark.parametrize(
    "file",
    ["../first/model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "model.bin", 7],
)
def test_an_index_that_leads_elsewhere_is_refused(sharded: Path, target: TargetSpec, file: object):
    edit_index(sharded, lambda weight_map: weight_map.update({"norm.weight": file}))
    message = refusal(sharded, target)
    assert '"weight_map.norm.weight"' in message


def test_a_stray_shard_is_refused(sharded: Path, target: TargetSpec):
    mx.save_safetensors(str(sharded / "model-00009.safetensors"), {"norm.weight": mx.ones(64)})
    assert "does not list it" in refusal(sharded, target)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path, target: TargetSpec):
    def swap(weight_map: dict[str, str]) -> None:
        other = set(weight_map.values()) - {weight_map["norm.weight"]}
        weight_map["norm.weight"] = other.pop()

    edit_index(sharded, swap)
    assert '"norm.weight" is not in' in refusal(sharded, target)


def test_a_tensor_in_two_files_is_refused(first: Path, target: TargetSpec):
    mx.save_safetensors(str(first / "model-extra.safetensors"), {"norm.weight": mx.ones(64)})
    assert '"norm.weight" is also in' in refusal(first, target)


# Fingerprints


def test_a_fingerprint_is_stable_and_sees_config_shapes_and_weights(
    tmp_path: Path, target_path: Path, target: TargetSpec
):
    def fingerprint(name: str, **arguments: Any) -> str:
        path = write_drafter(tmp_path / name, target=target_path, **arguments)
        return read_drafter_spec(path, target).fingerprint

    base = fingerprint("base")
    assert fingerprint("same") == base
    others = {fingerprint("a", block_size=4), fingerprint("b", intermediate=64), fingerprint("c", seed=2)}
    assert len(others | {base}) == 4


def test_a_spec_crosses_a_process_border(today: Path, target: TargetSpec):
    spec = read_drafter_spec(today, target)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(replace(spec))
