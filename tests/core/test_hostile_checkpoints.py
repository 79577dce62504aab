"""Files of a stranger's checkpoint: refused by name, quickly, and with nothing of them read first."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from dflash_core.checkpoints import read_target_spec
from dflash_core.checkpoints.arrays import load_arrays
from dflash_core.checkpoints.json_file import parse_json_object, read_json_object, read_loose_json
from dflash_core.checkpoints.safetensors_header import read_header
from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.pair import TARGET
from dflash_core.text import Tokenizer
from dflash_core.text.files import eos_ids, template_sources
from dflash_core.text.shield import unused_character


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_json_that_is_nested_too_deeply_is_refused_however_deep(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="nested too deeply"):
        parse_json_object(data, "config.json")


def test_one_key_given_twice_among_very_many_is_found_at_once() -> None:
    names = [*(f"k{i}" for i in range(200_000)), "k7"]
    data = ("{" + ",".join(f'"{name}":1' for name in names) + "}").encode()
    with pytest.raises(CheckpointError, match='"k7" is given twice'):
        parse_json_object(data, "config.json")


@pytest.mark.parametrize("data", [b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": [{"b": "x\\ud800"}]}'])
def test_half_a_surrogate_pair_in_a_file_is_refused(data: bytes) -> None:
    for is_strict in (True, False):
        with pytest.raises(CheckpointError, match="half a surrogate pair"):
            parse_json_object(data, "config.json", is_strict=is_strict)


def test_an_error_shows_what_a_file_says_in_a_bearable_length_and_without_orders_to_terminals() -> None:
    error = CheckpointError('tensor "\x1b[2J\u202e' + "x" * 10_000 + '"')
    assert str(error).isprintable()
    assert "\\x1b[2J\\u202e" in str(error)
    assert len(str(error)) <= 2100


@pytest.mark.parametrize(
    "shape", [[10**19] * 400, [2**31], [0, 2**40], [1] * 9, [3] * 1_000_000], ids=lambda s: f"{len(s)} axes"
)
def test_a_shape_beyond_all_measure_is_refused_before_it_is_multiplied(
    tmp_path: Path, shape: list[int]
) -> None:
    file = write_header(
        tmp_path / "a.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    )
    with pytest.raises(CheckpointError, match="expected at most 8 axes") as caught:
        read_header(file)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("read", [read_json_object, read_loose_json, read_header])
def test_a_pipe_is_not_waited_for(tmp_path: Path, read: Any) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="no plain file"):
        read(pipe)


def test_a_dtype_that_mlx_does_not_know_is_a_checkpoint_error(tmp_path: Path) -> None:
    entry = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}
    file = write_header(tmp_path / "model.safetensors", {"a": entry}, b"abcdefgh")
    read_header(file)
    with pytest.raises(CheckpointError, match="MLX cannot read it"):
        load_arrays(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 10**12), ("num_hidden_layers", 10**9), ("hidden_size", "256"), ("head_dim", 1e30)],
)
def test_limits_of_a_trillion_are_refused_from_the_config_alone(
    tmp_path: Path, key: str, value: object
) -> None:
    for file in TARGET.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((TARGET / "config.json").read_text())
    config.get("text_config", config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f'{key}" is '):
        read_target_spec(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"text_config": [1]}'),
        ("config.json", b'{"eos_token_id": "two"}'),
        ("config.json", b'{"eos_token_id": [1, -5]}'),
        ("generation_config.json", b'{"eos_token_id": {"a": 1}}'),
        ("generation_config.json", b"[" * 5000),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 3}]}'),
        ("tokenizer_config.json", b'{"chat_template": ["default"]}'),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_files_about_text_are_read_or_refused_never_stumbled_over(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)

    def read() -> None:
        eos_ids(tmp_path, None)
        config = read_loose_json(tmp_path / name) if name == "tokenizer_config.json" else {}
        template_sources(tmp_path, config)

    if content == b'{"text_config": [1]}':
        read()
        return
    with pytest.raises(CheckpointError):
        read()


def test_a_tokenizer_that_is_no_limit_for_its_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read_loose_json(tmp_path / "tokenizer_config.json")


def test_a_tokenizer_wider_than_its_model_is_refused() -> None:
    tokenizer = Tokenizer.load(TARGET)
    tokenizer.require_within(8192)
    with pytest.raises(CheckpointError, match="token 8191; expected at most 8190"):
        tokenizer.require_within(8191)


def test_an_end_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    for file in TARGET.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4000000000}')
    with pytest.raises(CheckpointError, match="token 4000000000"):
        Tokenizer.load(tmp_path).require_within(8192)


def test_a_text_that_uses_every_private_character_is_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0x110000)))
    with pytest.raises(InvalidRequest, match="no character is left"):
        unused_character([{"role": "user", "content": everything}])
