"""Any interleaving of joins, steps, leaves, rows that fail and a drafter that is away, on a real window.

Whatever happens, each row ends once, says what it says alone, and has a slot of its own while it plays, with
a context and waiting features that add up to what the target has read; nothing is left when all have ended.
"""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_core.events import RoundReport, RowProgress
from dflash_core.loading import LoadedLane
from dflash_core.protocols import Drafts, FeatureBlock, Ready
from dflash_core.request import RowId, RowRequest, WindowId
from tests.core.engine_fixtures import (
    WINDOW,
    ListedWidths,
    ScriptedDrafter,
    alone,
    local,
    make_lane,
    open_window,
    prompt,
    row,
)

POISON = 90  # its embedding is not a number
MOST_STEPS = 300

SOUND = (
    row("short", prompt(1, 1), 15),
    row("long", prompt(2, 40), 6),
    row("one token", prompt(3, 17), 1),
    row("sampled", prompt(4, 8), 22, temperature=0.9, seed=5),
    row("many", prompt(6, 16), 33),
)
FAILING = (
    row("fails while it is read", (*prompt(7, 9), POISON, *prompt(8, 9)), 5),
    row("fails in its first round", prompt(9, 6), 8, logit_bias=((POISON, 1e4),)),
)


@cache
def poisoned_lane() -> LoadedLane:
    lane = make_lane(poisoned_token=POISON)
    assert all(POISON not in (*request.tokens, *alone(lane, request)) for request in SOUND)
    return lane


class AbsentDrafter(ScriptedDrafter):
    """Is away now and then: it has no drafts, and takes no features."""

    is_away = False

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        if self.is_away:
            return Ready(Drafts(mx.zeros((len(block.row_ids), 0), dtype=mx.int32), has_taken=False))
        return super().draft(window_id, block, anchors, width)


class WindowMachine(RuleBasedStateMachine):
    """A window between whoever sends rows and its drafter."""

    @initialize(
        max_rows=st.sampled_from((1, 2, 3, 4)),
        widths=st.lists(st.sampled_from((1, 2, 4, 8, 16)), min_size=1, max_size=4),
        rights=st.lists(st.integers(0, 16), min_size=3, max_size=3),
    )
    def open(self, max_rows: int, widths: list[int], rights: list[int]) -> None:
        mx.disable_compile()
        self.lane = poisoned_lane()
        self.scripts: dict[RowId, tuple[int, ...]] = {}
        self.drafter = AbsentDrafter(
            self.lane.drafter,
            self.scripts,
            lambda name, length: rights[(length + len(name)) % 3],
            avoid=POISON,
        )
        self.max_rows = max_rows
        self.window = open_window(
            self.lane,
            width=ListedWidths(widths),
            drafter=self.drafter,
            max_rows=max_rows,
            prefill_rows=2,
            prefill_chunk=16,
        )
        self.numbers = itertools.count()
        self.requests: dict[RowId, RowRequest] = {}  # every row that has joined
        self.open_rows: set[RowId] = set()
        self.leaving: set[RowId] = set()  # while a step was under way
        self.said: dict[RowId, tuple[int, ...]] = {}
        self.ends: dict[RowId, RowProgress] = {}
        self.is_begun = False

    @rule(kind=st.sampled_from((*SOUND, *SOUND, *FAILING)))
    def admit(self, kind: RowRequest) -> None:
        request = replace(kind, row_id=RowId(f"{kind.row_id} {next(self.numbers)}"))
        answer = alone(self.lane, kind) if kind in SOUND else (POISON,)
        self.scripts[request.row_id] = (*request.tokens, *answer)
        self.requests[request.row_id] = request
        self.open_rows.add(request.row_id)
        self.window.admit(request)

    @precondition(lambda self: self.open_rows)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        row_id = data.draw(st.sampled_from(sorted(self.open_rows)))
        self.open_rows.remove(row_id)
        if self.is_begun:
            self.leaving.add(row_id)
        self.window.retire(row_id)

    @rule()
    def begin(self) -> None:
        self.is_begun |= self.window.has_work
        self.window.begin()

    @precondition(lambda self: self.window.has_work)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.window.has_work:
                self.take(self.window.step())

    @rule()
    def lose_the_drafter(self) -> None:
        self.drafter.is_away = True

    @rule()
    def have_the_drafter_back(self) -> None:
        self.drafter.is_away = False

    def take(self, report: RoundReport) -> None:
        assert max(Counter(progress.row_id for progress in report.rows).values(), default=1) == 1
        for progress in report.rows:
            row_id = progress.row_id
            assert row_id in self.open_rows | self.leaving, "a word of a row that is gone"
            self.said[row_id] = self.said.get(row_id, ()) + progress.tokens
            if progress.finish is not None:
                self.ends[row_id] = progress
                self.open_rows.discard(row_id)
                self.leaving.discard(row_id)
        self.leaving.clear()
        self.is_begun = False

    @invariant()
    def rows_say_what_they_say_alone(self) -> None:
        for row_id, said in self.said.items():
            answer = self.scripts[row_id][len(self.requests[row_id].tokens) :]
            assert said == answer[: len(said)]

    @invariant()
    def every_row_has_a_slot_of_its_own_and_no_slot_is_kept(self) -> None:
        assert self.window.num_live <= min(self.max_rows, len(self.window.rows))
        known = len(self.open_rows | self.leaving)
        # A row whose first token is its last can end in ``begin``; that is told by the step.
        assert self.window.num_rows <= known if self.is_begun else self.window.num_rows == known
        live = [row.row_id for row in self.window.rows if row is not None]
        assert len(set(live)) == len(live)
        assert set(live) <= self.open_rows | self.leaving

    @invariant()
    def context_and_waiting_features_are_what_the_target_has_read(self) -> None:
        window, waiting = self.window, self.window._waiting.counts
        contexts = local(self.lane).context_lengths(WINDOW)
        assert contexts.keys() <= self.open_rows | self.leaving
        for slot, live in enumerate(window.rows):
            length = int(window.caches.lengths[slot])
            assert length == window._context_lengths[slot]
            if live is None:
                assert (length, waiting[slot]) == (0, 0)
                continue
            assert length == len(live.request.tokens) + len(live.emitted) - 1  # all but the anchor
            # Between the halves of a round its features are with the drafter already.
            assert contexts[live.row_id] in (
                {length - waiting[slot], length} if self.is_begun else {length - waiting[slot]}
            )

    def teardown(self) -> None:
        if not hasattr(self, "window"):
            return
        try:
            for _ in range(MOST_STEPS):
                if not self.window.has_work:
                    break
                self.take(self.window.step())
            assert not self.open_rows
            assert not local(self.lane).context_lengths(WINDOW)
            for row_id, end in self.ends.items():
                self.check_end(self.requests[row_id], end)
        finally:
            self.window.close()
            mx.enable_compile()
        assert local(self.lane).num_sessions == 0

    def check_end(self, request: RowRequest, end: RowProgress) -> None:
        if POISON in self.scripts[request.row_id]:
            assert (end.finish, end.error_kind) == ("error", "row_failed")
        else:
            assert end.finish == "length"
            assert len(self.said[request.row_id]) == request.max_tokens


WindowMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestWindow = WindowMachine.TestCase
