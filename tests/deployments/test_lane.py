"""A target replica's lane: whose turn it is, and what is asked of the drafter meanwhile."""

from dataclasses import dataclass, field

from deployments.lane import Lane
from deployments.messages import Admit, Answer, Closed, LastCall, Letter, Played
from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest, WindowId


@dataclass
class LoggingWindow:
    """Rows last as many rounds as their budget; says what it is asked to do, in one log for all windows."""

    name: str
    log: list[str]
    budgets: dict[RowId, int] = field(default_factory=dict)
    fails_to_begin: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.budgets)

    @property
    def num_rows(self) -> int:
        return len(self.budgets)

    def admit(self, request: RowRequest) -> None:
        self.budgets[request.row_id] = request.max_tokens

    def retire(self, row_id: RowId) -> None:
        self.budgets.pop(row_id, None)

    def begin(self) -> None:
        self.log.append(f"begin {self.name}")
        if self.fails_to_begin:
            raise RuntimeError("no drafter in the world")

    def step(self) -> RoundReport:
        self.log.append(f"step {self.name}")
        self.budgets = {row_id: budget - 1 for row_id, budget in self.budgets.items() if budget > 1}
        return RoundReport(WindowId(self.name), 1, 1, (), 0, 0)

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def lane_with(log: list[str], **rounds: int) -> tuple[Lane, dict[str, LoggingWindow], list[Answer]]:
    """A lane with a window of one row for each name, and what it posts."""
    windows: dict[str, LoggingWindow] = {}

    def open_window(window_id: WindowId) -> LoggingWindow:
        return windows.setdefault(window_id, LoggingWindow(window_id, log))

    lane, posted = Lane(open_window, max_windows=len(rounds)), list[Answer]()
    for name, budget in rounds.items():
        request = RowRequest(RowId(name), (1,), budget)
        letters = (Letter(1, Admit(request)), Letter(2, LastCall()))
        assert lane.open(WindowId(name), letters, posted.append)
    return lane, windows, posted


def test_one_window_asks_for_nothing_early_so_that_joins_need_not_wait() -> None:
    log: list[str] = []
    lane, _, _ = lane_with(log, a=3)
    while lane.step():
        pass
    assert log == ["step a"] * 3 + ["close a"]


def test_of_two_windows_each_has_its_drafts_made_while_the_other_verifies() -> None:
    log: list[str] = []
    lane, _, _ = lane_with(log, a=4, b=4)
    lane.step()
    lane.step()
    assert log == ["step a", "begin a", "step b", "begin b"] * 2


def test_the_window_that_is_left_alone_goes_on_as_one() -> None:
    log: list[str] = []
    lane, _, posted = lane_with(log, a=1, b=3)
    while lane.step():
        pass
    assert log == ["step a", "close a", "step b", "step b", "step b", "close b"]
    assert sum(isinstance(answer, Closed) for answer in posted) == 2


def test_a_window_that_fails_to_begin_ends_after_its_round_was_told_and_the_other_plays_on() -> None:
    log: list[str] = []
    lane, windows, posted = lane_with(log, a=3, b=3)
    windows["a"].fails_to_begin = True
    while lane.step():
        pass
    told = [a for a in posted if isinstance(a, Played) and a.report.window_id == "a"]
    assert len(told) == 1
    closed = [a for a in posted if isinstance(a, Closed)]
    assert [a.reason for a in closed] == ["failed", "finished"]
    assert log.count("step b") == 3
