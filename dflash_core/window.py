"""Rows that move together on one lane: they join and leave at round boundaries.

A window holds slots (a power of two, shrunk to its live rows), a prefill batch and rows that wait
for a free slot. ``step`` is all there is to play it: at most one prefill chunk, then one round.
Everything here runs on the MLX thread.
"""

import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from dflash_core.constraint import compile_constraint, constrain
from dflash_core.context import CONTEXT_POLICIES
from dflash_core.errors import ContextLengthExceeded, DFlashError, InvalidRequest, RowFailed
from dflash_core.events import RoundReport, RowProgress
from dflash_core.prefill import PrefillBatch, Prefilled
from dflash_core.prefixes import Prefixes
from dflash_core.processors import check_wishes
from dflash_core.protocols import Drafter, Drafts, FeatureBlock, Target
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.round import Plan, Started, finish_round, play_round, start_round
from dflash_core.row import Row
from dflash_core.row_cache import FRESH, bucket_rows
from dflash_core.sampling import SamplingArrays, pack
from dflash_core.shapes import AnyShape, ShapePolicy
from dflash_core.target import BlockInput, Outcome
from dflash_core.waiting import WaitingFeatures
from dflash_core.width import WidthPolicy

GRAMMAR_WAIT_S = 0.01  # short: other windows may play on the same thread


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """Chosen when a window forms; the round loop has no branch on any of it."""

    width: WidthPolicy
    max_rows: int = 16
    accept: str = "per_row"  # a key of accept.ACCEPT_POLICIES
    context: str = "per_row"  # a key of context.CONTEXT_POLICIES
    shapes: ShapePolicy = field(default_factory=AnyShape)  # must hold ``max_rows``; ``width`` obeys it too
    prefill_rows: int = 4
    prefill_chunk: int = 64


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step before its round is played."""

    num_prefilled: int
    first: tuple[RowProgress, ...]  # first tokens of rows whose prompt was read whole
    prefill_seconds: float
    num_live: int
    round: Started | None = None  # None: its drafts have not been asked for


class Window:
    """A set of rows and their state."""

    def __init__(
        self,
        window_id: WindowId,
        target: Target,
        drafter: Drafter,
        policy: WindowPolicy,
        prefixes: Prefixes | None = None,
    ):
        """``prefixes``, over this target and drafter, saves and finds states; None: all prompts are read."""
        self.window_id = window_id
        self.target, self.drafter, self.policy = target, drafter, policy
        self._prefixes = prefixes
        self.rows: list[Row | None] = [None]
        self.caches = target.new_caches(1, 1)
        self._queue: deque[Row] = deque()
        self._prefill = PrefillBatch(
            window_id,
            target,
            drafter,
            max_rows=policy.prefill_rows,
            chunk=policy.prefill_chunk,
            prefixes=prefixes,
        )
        self._waiting = WaitingFeatures(1, target.feature_size, target.feature_dtype)
        # Length of each slot's drafter context with its waiting features; under the per-row context
        # policy always the target's length.
        self._context_lengths = np.zeros(1, dtype=np.int32)
        self._take_features = CONTEXT_POLICIES[policy.context]
        self._sampling: SamplingArrays | None = None
        self._num_rounds = 0
        self._begun: _Begun | None = None
        self._leaving: list[RowId] = []  # retired while a step was under way
        self._is_closed = False

    # Membership

    @property
    def num_live(self) -> int:
        """Rows in the round."""
        return sum(row is not None for row in self.rows)

    @property
    def num_rows(self) -> int:
        """Rows live, prefilling or waiting."""
        return self.num_live + self._prefill.num_rows + len(self._queue)

    @property
    def free_rows(self) -> int:
        """Rows that could join now."""
        return max(0, self.policy.max_rows - self.num_rows)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, if only to tell of rows that ended in ``begin``."""
        return self._begun is not None or self.num_rows > 0

    def admit(self, request: RowRequest) -> None:
        """Queue a row; it takes a slot when one is free.

        Raises ContextLengthExceeded if its tokens and budget do not fit, InvalidRequest if it is empty
        or names tokens outside the vocabulary (MLX would not check), or if its id is taken.
        """
        self._assert_open()
        if self._has(request.row_id):
            raise InvalidRequest(f"the window has a row {request.row_id} already")
        if not request.tokens or request.max_tokens < 1:
            raise InvalidRequest("a row needs at least one token and one token of budget")
        if len(request.tokens) + request.max_tokens > self.target.max_context:
            raise ContextLengthExceeded(
                f"{len(request.tokens)} tokens and {request.max_tokens} to come exceed the context "
                f"of {self.target.max_context}"
            )
        if min(request.tokens) < 0 or max(request.tokens) >= self.target.vocab_size:
            raise InvalidRequest(f"token ids must lie in 0..{self.target.vocab_size - 1}", param="prompt")
        check_wishes(request, self.target.vocab_size)
        compiling = compile_constraint(request, self.target.grammars, self.target.vocab_size)
        self._queue.append(Row(request, compiling))

    def retire(self, row_id: RowId) -> None:
        """Remove a row, wherever it is, before the next round begins. Unknown ids are ignored."""
        if self._begun is not None:  # its slot is part of a round
            self._leaving.append(row_id)
            return
        self.policy.width.forget(row_id)
        for row in self._queue:
            if row.row_id == row_id:
                self._queue.remove(row)
                return
        if self._prefill.remove(row_id):
            self.drafter.drop(self.window_id, (row_id,))
            return
        for slot, row in enumerate(self.rows):
            if row is not None and row.row_id == row_id:
                self._vacate(slot, scrub=False)
                return

    def close(self) -> None:
        """Drop every row and the drafter's contexts; the window's last call."""
        self._is_closed = True
        self._begun = None
        self._queue.clear()
        for row in tuple(self._prefill.rows):
            if row is not None:
                self._prefill.remove(row.row_id)
        self.rows = [None]
        self.drafter.close(self.window_id)

    def _assert_open(self) -> None:
        assert not self._is_closed, "a window that was closed plays no more"

    def _has(self, row_id: RowId) -> bool:
        rows = (*self.rows, *self._prefill.rows, *self._queue)
        return any(row is not None and row.row_id == row_id for row in rows)

    # Playing

    def step(self) -> RoundReport:
        """Read at most one chunk of prompts, then play one round for the live rows.

        If ``begin`` was called, this is the rest of that step.
        """
        self._assert_open()
        begun = self._begun or self._prefill_step()
        self._begun = None
        if begun.num_live == 0:
            report = self._report(begun, 0, begun.first, {})
        else:
            played = play_round(self) if begun.round is None else finish_round(self, begun.round)
            report = self._report(begun, played.width, _merge(begun.first, played.rows), played.seconds)
            self.policy.width.observe(report)
        for row_id in self._leaving:
            self.retire(row_id)
        self._leaving.clear()
        return report

    def begin(self) -> None:
        """Do what the next step can do without drafts and ask for them, so that they are made meanwhile.

        Rows may join and leave all the same; that takes effect after the step.
        """
        self._assert_open()
        if self._begun is None and self.has_work:
            begun = self._prefill_step()
            self._begun = replace(begun, round=start_round(self)) if begun.num_live else begun

    def _prefill_step(self) -> _Begun:
        began = time.perf_counter()
        num_prefilled, first = self._advance_prefill()
        seconds = time.perf_counter() - began
        self._fit_slots(0)
        return _Begun(num_prefilled, first, seconds, self.num_live)

    def plan(self) -> Plan:
        """What the next round is about: who plays, how wide, what the drafter lacks."""
        budgets = np.array([0 if row is None else row.budget for row in self.rows], dtype=np.int32)
        anchors = np.array([0 if row is None else row.anchor for row in self.rows], dtype=np.int32)
        row_ids = tuple(None if row is None else row.row_id for row in self.rows)
        widest = min(self.drafter.block_size, bucket_rows(int(budgets.max())))
        width = self.policy.width.choose(row_ids, widest)
        x, counts = self._waiting.merged()
        if self._sampling is None:
            sampled = [None if row is None else row.sampled() for row in self.rows]
            self._sampling = pack(sampled, self.target.vocab_size)
        return Plan(
            width=width,
            block=BlockInput(mx.array(anchors), budgets, self._sampling),
            features=FeatureBlock(row_ids, self._context_lengths - counts, counts, x),
        )

    def constrain(self, block: BlockInput, drafts: Drafts) -> BlockInput:
        """The block with what its rows' grammars allow; without such rows the block as it is."""
        return constrain(self.rows, block, drafts.ids, self.target.vocab_size)

    def settle(self, drafts: Drafts, outcome: Outcome, features: mx.array) -> tuple[RowProgress, ...]:
        """Commit a round on the host: lengths, waiting features, tokens per row, rows that end."""
        if drafts.has_taken:
            self._waiting.clear()
        kept = (outcome.accepted + 1).astype(np.int32)  # 0 for idle slots
        self.caches.lengths += kept
        taken = self._take_features(kept).copy()
        self._context_lengths += taken
        self._waiting.add(features, taken)
        self._num_rounds += 1
        if self._sampling is not None:
            self._sampling = self._sampling.after(outcome.chosen, kept)
        return tuple(
            self._settle_row(slot, row, outcome) for slot, row in enumerate(self.rows) if row is not None
        )

    def _settle_row(self, slot: int, row: Row, outcome: Outcome) -> RowProgress:
        drafted = outcome.chosen.shape[1] - 1
        is_finite = bool(outcome.is_finite[slot])
        if row.failure is not None or not is_finite:  # a mask that failed may leave nothing finite
            self._vacate(slot, scrub=not is_finite)
            return _failed(row, drafted, row.failure or _NOT_FINITE)
        accepted = int(outcome.accepted[slot])
        tokens, reason = row.commit(tuple(outcome.chosen[slot, : accepted + 1].tolist()))
        if reason is not None:
            self._save_turn(slot, row)
            self._vacate(slot, scrub=False)
        walked = int(outcome.walked[slot])
        logprobs = outcome.logprobs(slot, row.request, len(tokens))
        accepted = min(accepted, len(tokens))
        return RowProgress(row.row_id, tokens, drafted, walked, accepted, reason, logprobs=logprobs)

    # Slots

    def _advance_prefill(self) -> tuple[int, tuple[RowProgress, ...]]:
        """Admit waiting rows as slots allow, read one chunk, move finished rows into the round.

        Returns the prompt tokens read and the first tokens of rows whose prompt is read whole.
        """
        self._start_waiting()
        if not self._prefill.num_rows:
            if self.num_live == 0:
                self._wait_for_grammar()
            return 0, ()
        num_tokens, finished = self._prefill.step()
        return num_tokens, tuple(self._begin(done) for done in finished)

    def _begin(self, done: Prefilled) -> RowProgress:
        """Emit a row's first token and give it a slot, unless it ends at once."""
        row = done.row
        if done.is_finite:
            self._prefill.keep_snapshots(row)
        if row.failure is not None or not done.is_finite:
            self._prefill.release(done.slot, scrub=not done.is_finite)
            self.drafter.drop(self.window_id, (row.row_id,))
            return _failed(row, 0, row.failure or _NOT_FINITE)
        tokens, reason = row.commit((done.token,))
        if reason is None:
            self._join(done)
        else:
            self.drafter.drop(self.window_id, (row.row_id,))
        self._prefill.release(done.slot, scrub=False)
        return RowProgress(
            row.row_id,
            tokens,
            0,
            0,
            0,
            reason,
            logprobs=done.logprobs,
            prompt_logprobs=done.prompt_logprobs,
            cached_tokens=done.cached_tokens,
            num_first=1,
        )

    def _start_waiting(self) -> None:
        """In order, but for rows whose grammar is still compiled."""
        while self._queue and self._prefill.num_rows < self._prefill.max_rows:
            if self.num_live + self._prefill.num_rows >= self.policy.max_rows:
                return
            row = next((row for row in self._queue if row.is_ready), None)
            if row is None:
                return
            self._queue.remove(row)
            self._prefill.add(row)

    def _wait_for_grammar(self) -> None:
        """With nothing else to play, a moment's rest instead of an empty step."""
        compiling = [row.compiling for row in self._queue if row.compiling is not None]
        wait(compiling, GRAMMAR_WAIT_S, FIRST_COMPLETED)

    def _join(self, done: Prefilled) -> None:
        self._fit_slots(1)
        slot = self.rows.index(None)
        length = int(self._prefill.caches.lengths[done.slot])
        self.caches.reserve_length(length)
        self.caches.copy_row(slot, self._prefill.caches, done.slot)
        self.rows[slot] = done.row
        self._context_lengths[slot] = length
        self._sampling = None

    def _vacate(self, slot: int, *, scrub: bool) -> None:
        """Free a slot; ``scrub`` zeroes all that its row leaves behind, which may not be finite."""
        row = self.rows[slot]
        assert row is not None
        self.rows[slot] = None
        self.caches.lengths[slot] = 0
        self._context_lengths[slot] = 0
        self._waiting.forget(slot, scrub=scrub)
        self._sampling = None
        self.drafter.drop(self.window_id, (row.row_id,))
        if scrub:
            self.caches.clear(slot)

    def _save_turn(self, slot: int, row: Row) -> None:
        """Save a chat's row at its end, unless a stop token cut its block: its state has read more by then.

        Nor is a context that was made for measuring (``context.shared``) the row's own.
        """
        if self._prefixes is None or not row.request.save_at:
            return
        length, tokens = int(self.caches.lengths[slot]), (*row.request.tokens, *row.emitted)
        if length > len(tokens) or length != self._context_lengths[slot]:
            return
        x, counts = self._waiting.merged()
        waiting = mx.take(x, mx.array([slot]), axis=0), int(counts[slot])
        snapshot = self._prefixes.take(self.window_id, row.row_id, self.caches, slot, waiting)
        if snapshot is not None:
            self._prefixes.keep(tokens, snapshot)

    def _fit_slots(self, num_joining: int) -> None:
        """Grow to hold joining rows; shrink when at most half is live and nobody is about to join."""
        wanted = self.policy.shapes.slots_for(self.num_live + num_joining)
        is_quiet = not self._queue and self._prefill.num_rows == 0
        if wanted == len(self.rows) or (wanted < len(self.rows) and not (is_quiet and num_joining == 0)):
            return
        live = [slot for slot, row in enumerate(self.rows) if row is not None]
        layout = [*live, *([FRESH] * (wanted - len(live)))]
        self.caches.arrange(layout, self.drafter.block_size)
        self._waiting.arrange(layout)
        self._context_lengths = np.array(
            [0 if slot == FRESH else self._context_lengths[slot] for slot in layout], dtype=np.int32
        )
        self.rows = [None if slot == FRESH else self.rows[slot] for slot in layout]
        self._sampling = None

    def _report(
        self, begun: _Begun, width: int, rows: tuple[RowProgress, ...], seconds: dict[str, float]
    ) -> RoundReport:
        return RoundReport(
            window_id=self.window_id,
            round_index=self._num_rounds,
            width=width,
            rows=rows,
            live_rows=begun.num_live,
            prefilling_rows=self._prefill.num_rows + len(self._queue),
            prefilled_tokens=begun.num_prefilled,
            seconds={"prefill": begun.prefill_seconds, **seconds},
            prefixes=None if self._prefixes is None else self._prefixes.take_counts(),
        )


_NOT_FINITE = RowFailed("the model produced a non-finite value")


def _failed(row: Row, drafted: int, failure: DFlashError) -> RowProgress:
    return RowProgress(row.row_id, (), drafted, 0, 0, "error", str(failure), failure.kind)


def _merge(first: tuple[RowProgress, ...], played: tuple[RowProgress, ...]) -> tuple[RowProgress, ...]:
    """One entry per row: a row's first token stands before what its first round committed."""
    alone = {progress.row_id: progress for progress in first}
    merged = tuple(_joined(alone.pop(p.row_id, None), p) for p in played)
    return merged + tuple(progress for progress in first if progress.row_id in alone)


def _joined(first: RowProgress | None, played: RowProgress) -> RowProgress:
    if first is None:
        return played
    return replace(
        played,
        tokens=first.tokens + played.tokens,
        logprobs=first.logprobs + played.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        num_first=first.num_first,
    )
