"""When a second window pays: the same rows in one window, and in two of half the rows that alternate.

    python -m tests.benchmarks.second_window --prompts FILE [--limit 32] [--rows 16] [--draft-ms 0,20,60]

The lane of a target replica plays both, greedily at the full block, over a drafter that needs --draft-ms
beside what its forward costs here: one elsewhere, that serves one window at a time. The clock stops when
nobody waits for a place: the last rows would wait for their drafts alone in either arm. Arms interleaved, the
first repetition not counted. Prints tokens per second (least, median, most), the ratio of the two and
for how many rows one arm's token ids begin as the other's; last, what the start-up measurement would choose.
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import eq
from pathlib import Path

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
import mlx.core as mx

from deployments.bench import machine
from deployments.lane import Lane
from deployments.messages import Admit, Answer, Letter, Played
from deployments.prompts import read_prompts
from dflash_core.calibration import measure_costs
from dflash_core.checkpoints import resolve_drafter, resolve_target
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.protocols import Drafter, Drafts, FeatureBlock, PendingDrafts
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text import Tokenizer
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy


@dataclass
class LateDrafter:
    """The lane's own drafter, as if it were elsewhere: busy for ``draft_s`` with each draft, in turn."""

    drafter: Drafter
    draft_s: float
    is_free_at: float = 0.0

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        self.drafter.extend(window_id, block)

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> "Late":
        pending = self.drafter.draft(window_id, block, anchors, width)
        self.is_free_at = max(self.is_free_at, time.perf_counter()) + self.draft_s
        return Late(pending, self.is_free_at)

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        self.drafter.drop(window_id, row_ids)

    def close(self, window_id: WindowId) -> None:
        self.drafter.close(window_id)


@dataclass(frozen=True)
class Late:
    """Drafts that are there at a time of the clock."""

    pending: PendingDrafts
    ready_at: float

    def wait(self) -> Drafts:
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return self.pending.wait()


def play(
    lane: LoadedLane, draft_s: float, requests: Sequence[RowRequest], rows: int, num_windows: int
) -> tuple[float, dict[RowId, tuple[int, ...]]]:
    """Tokens per second, and what each row said."""
    drafter = LateDrafter(lane.drafter, draft_s)
    policy = WindowPolicy(FixedWidth(drafter.block_size), rows // num_windows)
    windows = Lane(lambda window_id: Window(window_id, lane.target, drafter, policy), num_windows)
    said: dict[RowId, tuple[int, ...]] = {}
    waiting = deque(requests)
    freed: list[WindowId] = []  # a place of this window

    def post(answer: Answer) -> None:
        if isinstance(answer, Played):
            for row in answer.report.rows:
                said[row.row_id] = said.get(row.row_id, ()) + row.tokens
                if row.finish is not None:
                    freed.append(answer.report.window_id)

    began = time.perf_counter()
    names = [WindowId(str(number)) for number in range(num_windows)]
    for name in names:
        windows.open(name, (), post)
    freed += names * (rows // num_windows)
    for number in count(1):
        while freed and waiting:
            windows.apply(freed.pop(), [Letter(number, Admit(waiting.popleft()))])
        if freed:
            break
        windows.step()
    seconds = time.perf_counter() - began
    for name in names:
        windows.close(name)
    return sum(map(len, said.values())) / seconds, said


def main() -> None:
    """Play both arms at each delay and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--draft-ms", default="0,20,60")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    target, drafter = resolve_target("embedded"), resolve_drafter("embedded")
    lane = load_lane(target, drafter)
    requests = read_prompts(options.prompts, Tokenizer.load(target), limit=options.limit)
    print(machine(), dflash_core.blas.prepare())
    for delay in (float(ms) / 1e3 for ms in options.draft_ms.split(",")):
        rates: dict[int, list[float]] = {1: [], 2: []}
        answers: dict[int, dict[RowId, tuple[int, ...]]] = {}
        for repetition in range(options.repeat + 1):
            for num_windows, samples in list(rates.items())[:: -1 if repetition % 2 else 1]:
                rate, answers[num_windows] = play(lane, delay, requests, options.rows, num_windows)
                if repetition:
                    samples.append(rate)
        one, two = (f"{min(r):.0f}, {statistics.median(r):.0f}, {max(r):.0f}" for r in rates.values())
        ratio = statistics.median(rates[2]) / statistics.median(rates[1])
        pairs = [(answers[1].get(row_id, ()), tokens) for row_id, tokens in answers[2].items()]
        equal = sum(all(map(eq, *pair)) for pair in pairs)
        late = LateDrafter(lane.drafter, delay)
        costs = measure_costs(lane.target, late, max_rows=options.rows, budget_s=300.0)
        choice = "two windows" if costs.favours_two_windows else "one window"
        print(
            f"draft {1e3 * delay:3.0f} ms: one window {one} tok/s, two {two}, ratio {ratio:.2f}, "
            f"{equal} of {len(pairs)} equal; measured at start: {choice}"
        )


if __name__ == "__main__":
    main()
