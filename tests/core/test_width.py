"""Widths from measured costs and running acceptance."""

from dataclasses import replace

import pytest

from dflash_core.acceptance import Acceptance
from dflash_core.costs import RoundCosts, measure, measure_pair
from dflash_core.events import FinishReason, RoundReport, RowProgress
from dflash_core.request import RowId, WindowId
from dflash_core.width import WIDTHS, AutoWidth, FixedWidth

FLAT = RoundCosts({(1, width): 1.0 for width in WIDTHS[:5]})  # a wide block costs no more than a token
LINEAR = RoundCosts({(1, width): float(width) for width in WIDTHS[:5]})  # a block costs what its tokens cost


def report(width: int, walked: int, *, row: str = "a", finish: FinishReason | None = None) -> RoundReport:
    progress = RowProgress(RowId(row), (1,) * (walked + 1), width - 1, walked, walked, finish)
    return RoundReport(WindowId("w"), 1, width, (progress,), live_rows=1, prefilling_rows=0)


def test_where_width_is_free_the_widest_block_wins() -> None:
    assert AutoWidth(FLAT, Acceptance(16)).choose([RowId("a")], 16) == 16


def test_where_every_token_costs_as_much_classic_wins_over_bad_drafts() -> None:
    width = AutoWidth(LINEAR, Acceptance(16))
    for _ in range(20):
        width.observe(report(16, 0))
    assert width.choose([RowId("a")], 16) == 1


def test_the_width_never_exceeds_what_has_a_use() -> None:
    assert AutoWidth(FLAT, Acceptance(16)).choose([RowId("a")], 4) == 4
    assert FixedWidth(16).choose([RowId("a")], 4) == 4


def test_a_row_that_walks_far_gets_a_wider_block_than_one_that_does_not() -> None:
    costs = RoundCosts({(1, w): 1.0 + 0.25 * w for w in WIDTHS[:5]})
    acceptance = Acceptance(16)
    width = AutoWidth(costs, acceptance)
    for _ in range(6):
        width.observe(report(16, 15, row="good"))
        width.observe(report(16, 0, row="bad"))
    assert width.choose([RowId("good")], 16) > width.choose([RowId("bad")], 16)


def test_classic_rounds_are_interrupted_by_trials_inside_the_budget() -> None:
    acceptance = Acceptance(16)
    for _ in range(30):
        acceptance.observe(report(16, 0))
    width = AutoWidth(LINEAR, acceptance, trial_budget=0.03)
    chosen: list[int] = []
    for _ in range(2000):
        chosen.append(width.choose([RowId("a")], 16))
        width.observe(report(chosen[-1], 0))
    trials = [w for w in chosen if w > 1]
    assert trials, "drafts are never tried again"
    assert sum(w - 1 for w in trials) <= 0.03 * chosen.count(1) + max(trials)


GENTLE = RoundCosts({(1, w): 1.0 + 0.04 * w for w in WIDTHS[:5]})


def play(width: AutoWidth, row: str, num_rounds: int, most: int) -> list[int]:
    """Widths of a row's rounds, of whose drafts at most so many are right each time."""
    chosen: list[int] = []
    for number in range(num_rounds):
        chosen.append(width.choose([RowId(row)], 16))
        finish: FinishReason | None = "stop" if number == num_rounds - 1 else None
        width.observe(report(chosen[-1], min(most, chosen[-1] - 1), row=row, finish=finish))
    return chosen


def test_a_long_answer_that_fails_its_drafts_takes_none_from_the_next_rows() -> None:
    width = AutoWidth(GENTLE, Acceptance(16))
    for number in range(4):
        play(width, f"good{number}", 10, 15)
    assert play(width, "bad", 8000, 0).count(1) > 7000
    assert play(width, "next", 10, 15) == [16] * 10


def test_a_place_that_was_hopeless_is_tried_again_when_rows_walk_all_they_are_given() -> None:
    width = AutoWidth(GENTLE, Acceptance(16))
    before = [play(width, f"one{number}", 40, 1) for number in range(60)]
    assert before[-1].count(2) > 30
    after = [play(width, f"all{number}", 40, 15) for number in range(200)]
    assert after[-1] == [16] * 40


def test_a_trial_is_charged_what_it_took_and_not_what_it_was_thought_to_take() -> None:
    acceptance = Acceptance(16)
    for _ in range(30):
        acceptance.observe(report(16, 0))
    width = AutoWidth(LINEAR, acceptance, trial_budget=0.03)
    spent = {"classic": 0.0, "trial": 0.0}
    for _ in range(2000):
        chosen = width.choose([RowId("a")], 16)
        # Twice as slow as measured, and a wide round waits ninety seconds for the drafter to catch up.
        taken = 2.0 * chosen + (90.0 if chosen > 1 else 0.0)
        spent["classic" if chosen == 1 else "trial"] += taken - (0.0 if chosen == 1 else 2.0)
        width.observe(replace(report(chosen, 0), seconds={"draft": 0.5 * taken, "verify": 0.5 * taken}))
    assert spent["trial"] > 0
    assert spent["trial"] <= 0.03 * spent["classic"] + 92.0


def test_a_round_says_nothing_about_places_behind_its_block() -> None:
    acceptance = Acceptance(16)
    before = acceptance.expected([RowId("a")], 16) - acceptance.expected([RowId("a")], 2)
    for _ in range(10):
        acceptance.observe(report(2, 1))  # width 2, its only draft walked
    after = acceptance.expected([RowId("a")], 16) - acceptance.expected([RowId("a")], 2)
    assert after > before  # the first place became likelier, the others kept their estimates


def test_a_row_that_ends_shows_no_mismatch_behind_its_stop_token() -> None:
    ended, cut = Acceptance(16), Acceptance(16)
    for _ in range(50):
        ended.observe(report(16, 3, row="x", finish="stop"))
        cut.observe(report(16, 3, row="y"))
    assert ended.expected([RowId("new")], 8) > cut.expected([RowId("new")], 8)


def test_a_row_that_left_is_forgotten() -> None:
    acceptance = Acceptance(16)
    for _ in range(5):
        acceptance.observe(report(16, 0))
    pessimistic = acceptance.expected([RowId("a")], 16)
    acceptance.forget(RowId("a"))
    assert acceptance.expected([RowId("a")], 16) > pessimistic


def test_costs_between_measured_pairs_lie_near_their_neighbours() -> None:
    costs = RoundCosts({(1, 1): 1.0, (4, 16): 4.0})
    assert costs.seconds(4, 16) == 4.0
    assert costs.seconds(3, 16) == 4.0  # three rows play in four slots
    assert 2.0 < costs.seconds(4, 8) < 4.0


def test_a_shape_that_was_disturbed_while_it_was_timed_costs_at_most_what_a_wider_one_does() -> None:
    costs = RoundCosts({(1, 1): 1.0, (1, 4): 9.0, (1, 8): 3.0, (2, 4): 2.0})
    assert [costs.seconds(1, width) for width in (1, 4, 8)] == [1.0, 3.0, 3.0]


def test_two_windows_are_favoured_where_they_clearly_take_less_time_than_one() -> None:
    table = {(16, 16): 1.0}
    assert RoundCosts(table, {(16, 16): 0.9}).favours_two_windows
    assert not RoundCosts(table, {(16, 16): 0.99}).favours_two_windows
    assert not RoundCosts(table).favours_two_windows


def test_widths_are_timed_in_turn_and_two_windows_after_a_round_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[int] = []
    measure(lambda _slots, width: lambda: played.append(width), [1], [1, 4], budget_s=60.0, repeat=3)
    assert played == [4, 1] + [4, 1] * 3
    seconds = iter([30.0, 0.02, 0.01, 0.03])
    clock = [0.0]

    def play_both() -> None:
        clock[0] += next(seconds)

    monkeypatch.setattr("dflash_core.costs.time.perf_counter", lambda: clock[0])
    assert measure_pair(play_both, repeat=3) == pytest.approx(0.01)


def test_costs_survive_their_json() -> None:
    costs = RoundCosts(FLAT.table, {(16, 8): 0.5})
    assert RoundCosts.from_json(costs.as_json()) == costs
    with pytest.raises(ValueError, match="empty"):
        RoundCosts.from_json({"rounds": {}, "paired": {}})


def test_measuring_stops_at_its_budget_and_keeps_what_it_has() -> None:
    played: list[tuple[int, int]] = []

    def open_round(slots: int, width: int):
        return lambda: played.append((slots, width))

    costs = measure(open_round, [1, 2, 4], [1, 4], budget_s=0.0)
    assert set(costs.table) == {(1, 4)}
    full = measure(open_round, [1, 2], [1, 4], budget_s=60.0)
    assert set(full.table) == {(1, 1), (1, 4), (2, 1), (2, 4)}
    played.clear()
    more = measure(open_round, [1, 2, 4], [1, 4], budget_s=60.0, known=full)
    assert set(played) == {(4, 1), (4, 4)}  # what is known is not timed again
    assert full.table.items() <= more.table.items()
