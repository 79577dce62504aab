"""Costs are measured with real rounds of the shapes that they stand for, and nothing is left of them."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from dflash_core.calibration import GivenWidth, measure_costs
from dflash_core.costs import RoundCosts
from dflash_core.target import Target
from tests.core.engine_fixtures import eager, local, make_lane, tiny_lane

WIDTHS = (1, 2, 4, 8, 16)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Slots, live rows and width of each verify."""
    shapes: list[tuple[int, int, int]] = []
    verify = Target.verify

    def noted(self, caches, block, drafts, accept):
        shapes.append((len(block.budgets), int((block.budgets > 0).sum()), drafts.shape[1] + 1))
        return verify(self, caches, block, drafts, accept)

    monkeypatch.setattr(Target, "verify", noted)
    return shapes


def test_every_width_is_timed_at_every_row_bucket_with_full_windows(
    played: list[tuple[int, int, int]],
) -> None:
    lane = tiny_lane(mx.float32)
    costs = measure_costs(lane.target, lane.drafter, max_rows=2, budget_s=120.0)
    assert set(costs.table) == {(rows, width) for rows in (1, 2) for width in WIDTHS}
    assert all(0 < seconds < 60 for seconds in costs.table.values())
    for slots in (1, 2):
        for width in WIDTHS:  # once to compile, then what counts
            assert played.count((slots, slots, width)) >= 6


def test_what_is_known_is_not_played_and_a_spent_budget_measures_one_pair(
    played: list[tuple[int, int, int]],
) -> None:
    lane = tiny_lane(mx.float32)
    known = RoundCosts({(rows, width): 9.0 for rows in (1, 2) for width in WIDTHS}, {(2, 16): 9.0})
    assert measure_costs(lane.target, lane.drafter, max_rows=2, budget_s=60.0, known=known) == known
    assert played == []
    brief = measure_costs(lane.target, lane.drafter, max_rows=2, budget_s=0.0)
    assert set(brief.table) == {(1, 16)}


def test_two_windows_with_half_the_rows_each_are_timed_at_the_full_block(
    played: list[tuple[int, int, int]],
) -> None:
    lane = tiny_lane(mx.float32)
    known = RoundCosts({(rows, width): 9.0 for rows in (1, 2, 4) for width in WIDTHS})
    costs = measure_costs(lane.target, lane.drafter, max_rows=4, budget_s=60.0, known=known)
    assert costs.table == known.table
    assert set(costs.paired) == {(4, 16)}
    assert played.count((2, 2, 16)) >= 12  # six rounds of each


def test_a_measurement_leaves_no_state_in_the_drafter() -> None:
    lane = make_lane(mx.float32)
    measure_costs(lane.target, lane.drafter, max_rows=1, budget_s=0.0)
    assert local(lane).num_sessions == 0
    known = RoundCosts({(rows, width): 9.0 for rows in (1, 2) for width in WIDTHS})
    measure_costs(lane.target, lane.drafter, max_rows=2, budget_s=60.0, known=known)
    assert local(lane).num_sessions == 0


def test_a_given_width_is_cut_to_what_has_a_use() -> None:
    given = GivenWidth()
    assert given.choose([None], 16) == 1
    given.width = 8
    assert [given.choose([None], widest) for widest in (16, 4)] == [8, 4]
