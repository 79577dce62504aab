"""What ``make faults`` holds against an application can fail: the checks themselves, without one."""

from collections import Counter

import pytest

from tests.faults.memory import LONG_S, PERIOD_S, SETTLED_S, MemoryWatch
from tests.faults.report import Row, table
from tests.faults.soak import MORE, Log, judge_counters
from tests.faults.streams import Heard, Question
from tests.faults.traffic import QUESTIONS, References

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
    assert log.may_be_cut(heard([1], [6], error="RemoteProtocolError"))
    assert not Log(proxy_away=[(12.5, 13.0)]).may_be_cut(heard([1], [6], error="RemoteProtocolError"))


@pytest.mark.parametrize("error", ["row_failed", "internal_error", "deadline_exceeded", "ReadTimeout"])
def test_no_killed_proxy_excuses_an_error_of_ours_or_silence(error: str) -> None:
    assert not Log(proxy_away=[(11.0, 13.0)]).may_be_cut(heard([1], [6], error=error))


@pytest.mark.parametrize(
    ("one", "may"),
    [
        (Heard(QUESTION, error="ConnectError"), False),
        (Heard(QUESTION, error="queue_full", status=429), False),
        (Heard(QUESTION, error="not ours", status=503), False),
        (Heard(QUESTION, error="connection", is_rpc=True), False),  # it had no place yet
        (Heard(QUESTION, error="connection", is_rpc=True, status=200), True),
        (Heard(QUESTION, error="RemoteProtocolError", status=200), True),
        (Heard(QUESTION, error="ReadError"), True),  # a whole answer that was on its way
        (Heard(QUESTION, was_left=True, status=200), True),
        (Heard(QUESTION, status=200), False),
    ],
)
def test_only_an_answer_that_was_broken_off_may_have_ended_unseen(one: Heard, may: bool) -> None:
    assert one.may_have_finished is may


def test_an_end_that_no_client_can_have_had_is_a_fault() -> None:
    whole, cut = heard([1], [6]), Heard(QUESTION, error="RemoteProtocolError", status=200)
    log = Log([whole, cut, *[Heard(QUESTION, error="ConnectError") for _ in range(99)]])
    num_before = len(QUESTIONS) + sum(question.n for question in MORE)
    for finished, is_right in ((1, False), (2, True), (4, True), (5, False)):
        counts = Counter(stop=1, length=num_before + finished - 1)
        assert (judge_counters(counts, [whole], log) == []) is is_right, finished
    assert judge_counters(Counter(length=num_before + 2, error=1), [whole], log) == ["1 choices failed"]


def watched(mib_per_hour: float, seconds: float, ends_at: float | None = None) -> MemoryWatch:
    """One process beside another, which grows once; it is calm from the beginning."""
    watch, at = MemoryWatch(), 0.0
    watch.note_calm(0.0)
    while at <= seconds:
        early = 200 * min(at, SETTLED_S) / SETTLED_S  # caches fill
        step = 8 * (at > SETTLED_S + LONG_S / 2)
        sizes = {"Router steps": 150 + at % 2 + step, "Target a": 300 + early + mib_per_hour * at / 3600}
        watch.note(at, sizes if ends_at is None or at < ends_at else {"Router steps": 150.0})
        at += PERIOD_S
    return watch


ENOUGH_S = SETTLED_S + LONG_S + 2 * PERIOD_S


def test_a_process_that_grows_is_a_fault_and_one_that_fills_its_caches_is_not() -> None:
    assert watched(0.0, ENOUGH_S).faults() == []
    assert watched(200.0, ENOUGH_S).faults() == ["Target a grows by 200 MiB an hour"]
    assert "Router: " in (told := watched(20.0, ENOUGH_S).slopes())
    assert "Target: +20.0" in told


def test_a_process_that_was_not_seen_for_long_is_not_judged() -> None:
    watch = watched(200.0, ENOUGH_S - LONG_S / 2)
    assert (watch.faults(), "nothing was seen" in watch.slopes()) == ([], True)


def test_a_process_that_ends_while_nobody_is_killed_is_a_fault() -> None:
    assert watched(0.0, ENOUGH_S, ends_at=SETTLED_S).faults() == ["Target a ended by itself"]
