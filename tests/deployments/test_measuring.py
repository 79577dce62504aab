"""Costs of rounds are measured once under the same circumstances, then read from disk."""

from pathlib import Path

import pytest

from deployments import measuring
from deployments.measuring import Circumstances, width_costs
from dflash_core.costs import RoundCosts
from tests.core.engine_fixtures import tiny_lane

HERE = Circumstances("target", "drafter", max_rows=4, budget_s=1.0)
COSTS = RoundCosts({(1, 1): 0.01, (1, 16): 0.02})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row counts that were measured."""
    rows: list[int] = []

    def measure(target: object, drafter: object, *, max_rows: int, budget_s: float) -> RoundCosts:
        rows.append(max_rows)
        return COSTS

    monkeypatch.setattr(measuring, "measure_costs", measure)
    return rows


def costs(where: Circumstances, folder: Path | None, is_sound: bool = True) -> RoundCosts:
    lane = tiny_lane()
    return width_costs(lane.target, lane.drafter, where, folder, lambda: is_sound)


def test_the_second_start_reads_what_the_first_one_measured(measured: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert costs(HERE, folder) == costs(HERE, folder) == COSTS
    assert measured == [4]
    assert [file.suffix for file in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "other",
    [
        Circumstances("another", "drafter", 4, 1.0),
        Circumstances("target", "another", 4, 1.0),
        Circumstances("target", "drafter", 8, 1.0),
        Circumstances("target", "drafter", 4, 9.0),
        Circumstances("target", "drafter", 4, 1.0, transport="ref"),
        Circumstances("target", "drafter", 4, 1.0, threads=1),
    ],
)
def test_other_circumstances_are_measured_anew(
    measured: list[int], tmp_path: Path, other: Circumstances
) -> None:
    costs(HERE, tmp_path)
    costs(other, tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("fact", ["backend", "processor", "mlx_version"])
def test_another_machine_or_version_is_measured_anew(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    costs(HERE, tmp_path)
    monkeypatch.setattr(measuring, fact, lambda: "another")
    costs(HERE, tmp_path)
    assert len(measured) == 2


def test_without_a_folder_nothing_is_kept(measured: list[int]) -> None:
    costs(HERE, None)
    costs(HERE, None)
    assert len(measured) == 2


def test_a_measurement_that_is_not_sound_is_not_kept(measured: list[int], tmp_path: Path) -> None:
    costs(HERE, tmp_path, is_sound=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"1x1": "?"}', "[1]"])
def test_a_file_that_cannot_be_read_is_replaced(measured: list[int], tmp_path: Path, text: str) -> None:
    costs(HERE, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert costs(HERE, tmp_path) == COSTS
    assert len(measured) == 2
    costs(HERE, tmp_path)
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_measurement(
    measured: list[int], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert costs(HERE, tmp_path / "file") == COSTS
