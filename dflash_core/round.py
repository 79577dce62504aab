"""One round: draft, verify, accept, commit. Written once, for one row or many, here or across a cluster."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.events import RowProgress
from dflash_core.protocols import FeatureBlock
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


def play_round(window: "Window") -> Played:
    """Play one round for every live row of a window. Classic is the same round at width 1."""
    began = time.perf_counter()
    plan = window.plan()
    pending = window.drafter.draft(window.window_id, plan.features, plan.block.anchors, plan.width)
    drafts = pending.wait()
    drafted = time.perf_counter()
    block = window.constrain(plan.block, drafts)
    verdict = window.target.verify(window.caches, block, drafts.ids, window.policy.accept)
    outcome = verdict.read()
    verified = time.perf_counter()
    rows = window.settle(drafts, outcome, verdict.features)
    settled = time.perf_counter()
    seconds = {"draft": drafted - began, "verify": verified - drafted, "commit": settled - verified}
    return Played(width=drafts.ids.shape[1] + 1, rows=rows, seconds=seconds)
