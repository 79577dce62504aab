"""The benchmark of peers, without any: the copy made for one of them, what is left out, what is compared."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_core.checkpoints import load_target, read_target_spec
from dflash_core.checkpoints.weight_files import read_weight_files
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import RowId, RowRequest
from tests.benchmarks.peers.arms import ARMS, make_arms
from tests.benchmarks.peers.setting import Answers, Setting
from tests.benchmarks.peers.table import compare
from tests.benchmarks.peers.vision_copy import is_text_only, mrope_section, write_vision_copy
from tests.core.tiny_checkpoints import write_target


@pytest.fixture(params=["embedded", "mlx", "one file"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    match request.param:
        case "embedded":
            return TARGET
        case "mlx":
            return write_target(tmp_path / "target", layout="mlx", num_shards=2)
        case _:
            return write_target(tmp_path / "target", quantize=4, tied=False)


@pytest.fixture
def copied(target: Path, tmp_path: Path) -> Path:
    (tmp_path / "copy").mkdir()
    return write_vision_copy(target, tmp_path / "copy")


def test_the_copy_has_what_mlx_vlm_asks_of_a_config(target: Path, copied: Path):
    assert is_text_only(target)
    assert not is_text_only(copied)
    config = json.loads((copied / "config.json").read_text())
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    assert config["vision_config"]["deepstack_visual_indexes"] == []
    assert config["vision_config"]["out_hidden_size"] == text["hidden_size"]
    assert 2 * sum(rope["mrope_section"]) == text["head_dim"] * rope["partial_rotary_factor"]
    assert {"type", "rope_theta"} <= rope.keys()


def test_the_index_of_the_copy_names_every_tensor_and_none_of_a_tower(copied: Path):
    weight_map = json.loads((copied / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == read_weight_files(copied).tensors.keys()
    assert all(
        name.startswith(("model.language_model.", "language_model.", "lm_head.")) for name in weight_map
    )


def test_the_copy_is_the_same_model(target: Path, copied: Path):
    prompt = mx.array([[5, 17, 60, 2, 31]])
    whole, copy = load_target(target), load_target(copied)
    assert mx.array_equal(whole.model(prompt), copy.model(prompt)).item()
    assert read_target_spec(copied).rope_theta == read_target_spec(target).rope_theta


@pytest.mark.parametrize(("pairs", "sections"), [(32, [11, 11, 10]), (8, [3, 3, 2]), (4, [2, 1, 1])])
def test_sections_share_the_rotated_pairs_out_as_the_released_models_do(pairs: int, sections: list[int]):
    assert mrope_section(pairs) == sections


def test_an_arm_that_is_not_installed_is_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for package in ("dflash", "mlx_dspark", "mlx_vlm"):
        monkeypatch.setitem(sys.modules, package, None)
    request = RowRequest(RowId("a"), (5, 17), 4)
    arms = make_arms(["vlm", "zlab", "dspark", "one"], Setting(TARGET, DRAFTER, [request], 1))
    assert list(arms) == ["mlx-lm one by one"]
    assert [len(answer) for answer in arms["mlx-lm one by one"]()] == [4]
    said = capsys.readouterr().err
    assert [line.split(":")[0] for line in said.splitlines()] == [
        f"{name} is left out" for name in ("dspark", "zlab", "vlm")
    ]


def test_an_arm_that_cannot_run_the_pair_is_left_out_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(setting: Setting):
        raise NotImplementedError("recurrent layers")

    monkeypatch.setitem(ARMS, "vlm", ("vlm", refuse))
    assert make_arms(["vlm"], Setting(TARGET, DRAFTER, [], 1)) == {}
    assert capsys.readouterr().err == "vlm is left out: recurrent layers\n"


def test_answers_are_compared_with_the_first_arms_and_the_worst_repetition_counts():
    other: Iterator[Answers] = iter([[(1, 2), (3,)], [(1, 2), (4,)], [(1, 2), (3,)]])
    lines = compare({"first": lambda: [(1, 2), (3,)], "other": lambda: next(other)}, 2)
    assert [line.split()[0] for line in lines] == ["first", "other"]
    assert lines[0].endswith("2 of 2 equal")
    assert lines[1].endswith("1 of 2 equal")
