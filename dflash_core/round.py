"""One round: draft, verify, accept, commit. Written once, for one row or many, here or across a cluster.

It is written against the protocols ``Drafter`` and ``Target``, in two halves, so that another window of the
target can verify while the drafts of this one are made.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.events import RowProgress
from dflash_core.protocols import FeatureBlock, PendingDrafts
from dflash_core.target import BlockInput

if TYPE_CHECKING:
    from dflash_core.window import Window


@dataclass(frozen=True, slots=True)
class Plan:
    """A round before it is played."""

    width: int
    block: BlockInput
    features: FeatureBlock


@dataclass(frozen=True, slots=True)
class Played:
    """A round after it was played."""

    width: int
    rows: tuple[RowProgress, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Started:
    """A round whose drafts are asked for."""

    plan: Plan
    pending: PendingDrafts
    seconds: float  # that asking took


def play_round(window: "Window") -> Played:
    """The whole round, for a window whose drafts were not asked for before."""
    return finish_round(window, start_round(window))


def start_round(window: "Window") -> Started:
    """Plan a round for every live row of a window and ask for its drafts; waits for nothing."""
    began = time.perf_counter()
    plan = window.plan()
    pending = window.drafter.draft(window.window_id, plan.features, plan.block.anchors, plan.width)
    return Started(plan, pending, time.perf_counter() - began)


def finish_round(window: "Window", started: Started) -> Played:
    """Take the drafts, verify, commit. Classic is the same round at width 1."""
    began = time.perf_counter()
    drafts = started.pending.wait()
    drafted = time.perf_counter()
    block = window.constrain(started.plan.block, drafts)
    verdict = window.target.verify(window.caches, block, drafts.ids, window.policy.accept)
    outcome = verdict.read()
    verified = time.perf_counter()
    rows = window.settle(drafts, outcome, verdict.features)
    settled = time.perf_counter()
    seconds = {
        "draft": started.seconds + drafted - began,  # of this thread: what it waited for them
        "verify": verified - drafted,
        "commit": settled - verified,
    }
    return Played(width=drafts.ids.shape[1] + 1, rows=rows, seconds=seconds)
