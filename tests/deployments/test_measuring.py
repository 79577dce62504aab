"""Costs of rounds are measured once under the same circumstances, then read from disk."""

from pathlib import Path

import pytest

from deployments import measuring
from deployments.measuring import Circumstances, width_costs
from dflash_core.costs import RoundCosts
from tests.core.engine_fixtures import tiny_lane

HERE = Circumstances("target", "drafter", max_rows=4)
PAIRS = [(1, 16), (1, 1), (2, 16), (2, 1)]
COSTS = RoundCosts(dict.fromkeys(PAIRS, 0.01))


Pair = tuple[int, int]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The pairs that were timed; the budget is how many."""
    timed: list[Pair] = []

    def measure(
        target: object, drafter: object, *, max_rows: int, budget_s: float, known: RoundCosts | None
    ) -> RoundCosts:
        table = dict(known.table) if known is not None else {}
        for pair in [pair for pair in PAIRS if pair not in table][: int(budget_s)]:
            timed.append(pair)
            table[pair] = 0.01
        return RoundCosts(table)

    monkeypatch.setattr(measuring, "measure_costs", measure)
    return timed


def costs(
    where: Circumstances, folder: Path | None, budget_s: float = 4, is_sound: bool = True
) -> RoundCosts:
    lane = tiny_lane()
    return width_costs(lane.target, lane.drafter, where, folder, budget_s=budget_s, is_sound=lambda: is_sound)


def test_the_second_start_reads_what_the_first_one_measured(measured: list[Pair], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert costs(HERE, folder) == costs(HERE, folder) == COSTS
    assert measured == PAIRS
    assert [file.suffix for file in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "other",
    [
        Circumstances("another", "drafter", 4),
        Circumstances("target", "another", 4),
        Circumstances("target", "drafter", 8),
        Circumstances("target", "drafter", 4, transport="ref"),
        Circumstances("target", "drafter", 4, threads=1),
    ],
)
def test_other_circumstances_are_measured_anew(
    measured: list[Pair], tmp_path: Path, other: Circumstances
) -> None:
    costs(HERE, tmp_path)
    costs(other, tmp_path)
    assert len(measured) == 2 * len(PAIRS)


@pytest.mark.parametrize("fact", ["backend", "processor", "mlx_version"])
def test_another_machine_or_version_is_measured_anew(
    measured: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    costs(HERE, tmp_path)
    monkeypatch.setattr(measuring, fact, lambda: "another")
    costs(HERE, tmp_path)
    assert len(measured) == 2 * len(PAIRS)


def test_a_start_without_the_time_for_all_leaves_the_rest_to_the_next(
    measured: list[Pair], tmp_path: Path
) -> None:
    assert set(costs(HERE, tmp_path, budget_s=3).table) == set(PAIRS[:3])
    assert costs(HERE, tmp_path, budget_s=3) == COSTS
    assert measured == PAIRS


def test_without_a_folder_nothing_is_kept(measured: list[Pair]) -> None:
    costs(HERE, None)
    costs(HERE, None)
    assert len(measured) == 2 * len(PAIRS)


def test_a_measurement_that_is_not_sound_is_not_kept(measured: list[Pair], tmp_path: Path) -> None:
    costs(HERE, tmp_path, is_sound=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"1x1": "?"}', "[1]"])
def test_a_file_that_cannot_be_read_is_replaced(measured: list[Pair], tmp_path: Path, text: str) -> None:
    costs(HERE, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert costs(HERE, tmp_path) == COSTS
    assert len(measured) == 2 * len(PAIRS)
    costs(HERE, tmp_path)
    assert len(measured) == 2 * len(PAIRS)


def test_a_folder_that_cannot_be_written_costs_only_the_measurement(
    measured: list[Pair], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert costs(HERE, tmp_path / "file") == COSTS
