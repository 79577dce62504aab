"""What ``make faults`` holds against an application can fail: the checks themselves, without one."""

import pytest

from tests.faults.report import Row, table
from tests.faults.soak import Log
from tests.faults.streams import Heard, Question
from tests.faults.traffic import References

QUESTION = Question("Hi", 5, n=2)
REFERENCES = References({QUESTION: {0: [1, 2, 3, 4, 5], 1: [6, 7, 8, 9, 10]}})


def heard(first: list[int], second: list[int], error: str = "", was_left: bool = False) -> Heard:
    one = Heard(QUESTION, began=10.0, error=error, was_left=was_left, ended=12.0)
    one.note(first, None, 0)
    one.note(second, None, 1)
    return one


@pytest.mark.parametrize(
    ("first", "second", "num_lost"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 0),
        ([1, 2, 3, 4], [6, 7, 8, 9, 10], 1),  # one is missing at the end
        ([1, 2, 2, 3, 4, 5], [6, 7, 8, 9, 10], 4),  # one came twice
        ([1, 2, 4, 5], [6, 7, 8, 9, 10], 3),  # one was left out
        ([1, 2, 3, 4, 5], [], 5),
        ([6, 7, 8, 9, 10], [1, 2, 3, 4, 5], 10),
    ],
)
def test_tokens_are_counted_from_the_first_difference(
    first: list[int], second: list[int], num_lost: int
) -> None:
    assert REFERENCES.num_lost(heard(first, second)) == num_lost


def test_a_part_of_an_answer_may_be_short_but_not_another() -> None:
    assert REFERENCES.num_lost(heard([1, 2], [6], error="cut")) == 0
    assert REFERENCES.num_lost(heard([1, 2], [6], was_left=True)) == 0
    assert REFERENCES.num_lost(heard([1, 3], [6], error="cut")) == 1


def test_rounds_tell_whether_they_drafted_but_first_and_last_tokens_do_not() -> None:
    one = Heard(Question("Hi", 8))
    for ids, drafted in (([1], 0), ([2, 3], 15), ([4, 5, 6, 7], 0), ([8], 0)):
        one.note(ids, drafted)
    assert [sample.is_inner for sample in one.samples] == [False, True, True, False]


def test_a_broken_promise_is_told_and_a_kept_one_is_not() -> None:
    row = Row("an event", 0.0123, None, notes=["by the way"])
    row.require(True, "kept")
    row.require_within(0.5, 1.0, "soon")
    assert row.cells == ("an event", "12", "-", "0", "0", "ok (by the way)")
    row.require(False, "broken")
    row.require_within(1.5, 1.0, "late")
    row.require_within(None, 1.0, "expected")
    verdict = "MISS: broken; late: 1500 ms, promised 1000 ms; expected: never, promised 1000 ms"
    assert row.misses
    assert verdict in table([row])


def test_only_what_met_a_killed_proxy_may_be_cut() -> None:
    log = Log(proxy_away=[(11.0, 13.0), (20.0, 30.0)])
    assert log.may_be_cut(heard([1], [6]))
    assert not Log(proxy_away=[(12.5, 13.0)]).may_be_cut(heard([1], [6]))
