"""Around a measurement on a worker: exit codes, flags, and a report that is never lost."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from deployments import cli
from deployments.jobs import bench, parity, worker
from deployments.jobs.worker import Assignment
from deployments.measurements import BenchRun, Chats, ParityRun
from dflash_core.errors import CheckpointError

Run = Callable[..., int]


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Assignment, Chats]]:
    """What would have gone to a worker."""
    seen: list[tuple[Assignment, Chats]] = []

    def on_worker(assignment: Assignment, chats: Chats) -> dict[str, Any]:
        seen.append((assignment, chats))
        return {"passed": chats.text.startswith("good"), "checks": []}

    monkeypatch.setattr(worker, "joined_cluster", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(worker, "_on_worker", on_worker)
    return seen


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(main: Callable[..., None], *flags: object, chats: str = "good\u2028") -> int:
        (tmp_path / "chats.jsonl").write_text(chats, encoding="utf-8")
        paths = ["--prompts", tmp_path / "chats.jsonl", "--output", tmp_path / "new" / "report.json"]
        monkeypatch.setattr(sys, "argv", ["job", *map(str, [*paths, *flags])])
        with pytest.raises(SystemExit) as stop:
            cli.run(lambda: typer.run(main))
        return int(stop.value.code or 0)

    return call


def test_the_gates_verdict_is_the_exit_code_and_the_report_is_there_either_way(
    run: Run, assigned: list[Any], tmp_path: Path
) -> None:
    for chats, code in (("good", 0), ("bad", 1)):
        assert run(parity.main, chats=chats) == code
        assert json.loads((tmp_path / "new" / "report.json").read_text())["passed"] == (code == 0)


def test_flags_reach_the_worker(run: Run, assigned: list[Any]) -> None:
    flags = ("--limit", 3, "--num-cpus", 2, "--resources", '{"apple_silicon": 1}')
    assert run(bench.main, *flags, "--arms", "clamp,per_row", "--width", 8) == 0
    assert run(parity.main, *flags, "--temperature", 0.5, "--dtype", "bfloat16") == 0
    (first, chats), (second, _) = assigned
    assert (chats.text, chats.name, chats.limit) == ("good\u2028", "chats.jsonl", 3)
    assert first.reserved == second.reserved == {"num_cpus": 2.0, "resources": {"apple_silicon": 1.0}}
    assert isinstance(first.measurement, BenchRun)
    assert (first.measurement.arms, first.measurement.width) == (("clamp", "per_row"), 8)
    assert isinstance(second.measurement, ParityRun)
    assert (second.measurement.temperature, second.measurement.models.dtype) == (0.5, "bfloat16")


@pytest.mark.parametrize("flags", [("--resources", "apple"), ("--resources", "[1]"), ("--dtype", "int8")])
def test_wrong_flags_are_wrong_usage(run: Run, assigned: list[Any], flags: tuple[str, str]) -> None:
    assert run(parity.main, *flags) == 2
    assert assigned == []


def test_a_report_that_cannot_be_written_is_in_the_log(
    run: Run, assigned: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "write_text", full)
    assert run(parity.main) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"passed": True, "checks": []}
    assert "No space left" in captured.err


def test_what_a_measurement_raises_is_one_line(
    run: Run, assigned: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise CheckpointError("config.json: no such key")

    monkeypatch.setattr(worker, "_on_worker", broken)
    assert run(bench.main) == 1
    assert capsys.readouterr().err == "dflash-serve: config.json: no such key\n"


def test_resources_that_no_node_has_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    reserved = worker.reserved_of(2.0, '{"apple_silicon": 1}')
    worker._tell_if_impossible(reserved, {"CPU": 8.0, "apple_silicon": 1.0})
    assert capsys.readouterr().err == ""
    worker._tell_if_impossible(reserved, {"CPU": 8.0})
    assert "apple_silicon 1 (there are 0)" in capsys.readouterr().err
