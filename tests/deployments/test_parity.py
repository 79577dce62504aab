"""The parity gate and the bench command on the embedded pair, and the gate's verdicts by hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.parity import ParityOptions, run
from deployments.prompts import read_prompts
from dflash_core import blas
from dflash_core.errors import InvalidRequest
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.parity import compare, first_difference, next_logits
from dflash_core.request import RowRequest, Sampling
from dflash_core.text import Tokenizer

QUESTIONS = ("Where is Haiti?", "What is 48 - 10?", 'Define "southwest".', "Tell me a story about a duck.")


@pytest.fixture(scope="module")
def lane() -> LoadedLane:
    return load_lane(TARGET, DRAFTER)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "chats.jsonl"
    lines = [
        {"custom_id": f"q{i}", "body": {"messages": [{"role": "user", "content": q}], "max_tokens": 40}}
        for i, q in enumerate(QUESTIONS)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def requests(prompts: Path) -> list[RowRequest]:
    return read_prompts(prompts, Tokenizer.load(TARGET))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gate_and_its_controls_hold_on_the_embedded_pair(
    lane: LoadedLane, prompts: Path, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature) if temperature else None
    requests = read_prompts(prompts, Tokenizer.load(TARGET), sampling=sampling)
    checks = run(lane, requests, ParityOptions(rows=4, width=16))
    assert {check.name for check in checks if not check.is_good} == set(), checks


def test_an_altered_token_is_a_near_tie_only_under_its_gap(
    lane: LoadedLane, requests: list[RowRequest]
) -> None:
    request = requests[0]
    logits = next_logits(lane.target, request.tokens)
    best, second = (int(t) for t in logits.argsort()[::-1][:2])
    gap = float(logits[best] - logits[second])
    near = compare(lane.target, request, [best, 7], [second, 9], margin=gap * 1.01)
    far = compare(lane.target, request, [best, 7], [second, 9], margin=gap * 0.99)
    assert (near.verdict, far.verdict) == ("near_tie", "different")
    assert near.position == 0
    assert near.gap == pytest.approx(gap, abs=1e-4)
    assert not near.passes(0.0)


def test_a_shorter_answer_without_another_token_is_different(
    lane: LoadedLane, requests: list[RowRequest]
) -> None:
    assert compare(lane.target, requests[0], [5, 6], [5], margin=100.0).verdict == "different"
    assert first_difference([5, 6], [5]) == 1
    assert first_difference([5, 6], [5, 6]) is None


def test_a_line_that_is_no_chat_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"custom_id": "x", "body": {"prompt": "no chat"}}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match="line 1"):
        read_prompts(file, Tokenizer.load(TARGET))


def test_a_lines_own_seed_and_end_count(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0}
    lines = [body, body | {"seed": 9, "ignore_eos": True, "max_tokens": 5}]
    file.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines), encoding="utf-8")
    tokenizer = Tokenizer.load(TARGET)
    first, second = read_prompts(file, tokenizer)
    assert (first.sampling.seed, first.stop_token_ids) == (1, tokenizer.eos_token_ids)
    assert (second.sampling.seed, second.stop_token_ids, second.max_tokens) == (9, frozenset(), 5)


def test_a_separator_inside_a_chat_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "separated.jsonl"
    body = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    file.write_text(json.dumps({"custom_id": "x", "body": body}, ensure_ascii=False), encoding="utf-8")
    assert [row.row_id for row in read_prompts(file, Tokenizer.load(TARGET))] == ["x"]


def test_bench_prints_every_arm_as_json(prompts: Path) -> None:
    arguments = ["bench", "--prompts", str(prompts), "--limit", "2", "--rows", "2", "--repeat", "1"]
    arguments += ["--width", "16", "--arms", "classic,clamp,per_row", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["machine"]["blas_threads"] == blas.num_threads()
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert list(arms) == ["classic", "clamp", "per_row"]
    assert arms["classic"]["accepted_per_row_round"] == 0
    assert arms["per_row"]["accepted_per_row_round"] >= arms["clamp"]["accepted_per_row_round"] > 0
    assert arms["per_row"]["rounds"] < arms["classic"]["rounds"]
    assert all(arm["equal_rows"] == 2 and len(arm["tok_s"]) == 1 for arm in arms.values())
