"""Our arms: one window, whole workload."""

from collections.abc import Callable

from dflash_core.acceptance import Acceptance
from dflash_core.calibration import measure_costs
from dflash_core.request import WindowId
from dflash_core.width import AutoWidth, FixedWidth, WidthPolicy
from dflash_core.window import Window, WindowPolicy
from dflash_core.workload import play_all
from tests.benchmarks.peers.setting import Answers, Play, Setting


def classic(setting: Setting) -> Play:
    """No drafts."""
    return _play(setting, lambda: FixedWidth(1))


def wide(setting: Setting) -> Play:
    """The drafter's whole block in every round."""
    block = setting.lane.drafter.block_size
    return _play(setting, lambda: FixedWidth(block))


def auto(setting: Setting) -> Play:
    """The width that measured costs and acceptance choose."""
    lane = setting.lane
    costs = measure_costs(lane.target, lane.drafter, max_rows=setting.rows, budget_s=240.0)
    print("ms per round:", {k: round(1e3 * v, 1) for k, v in costs.as_json()["rounds"].items()})
    return _play(setting, lambda: AutoWidth(costs, Acceptance(lane.drafter.block_size)))


def _play(setting: Setting, width: Callable[[], WidthPolicy]) -> Play:
    lane = setting.lane

    def play() -> Answers:
        policy = WindowPolicy(width=width(), max_rows=setting.rows)
        played = play_all(Window(WindowId("peers"), lane.target, lane.drafter, policy), setting.requests)
        return [played.tokens[request.row_id] for request in setting.requests]

    return play
