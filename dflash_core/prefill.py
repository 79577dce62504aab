"""Rows whose prompt is still being read, in chunks that interleave with rounds.

The target's own token after the prompt is the row's first, and the anchor of its first round. A fresh
request and one continued elsewhere (prompt + committed tokens) take exactly the same path.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_core.constraint import unconstrained
from dflash_core.events import TokenLogprobs
from dflash_core.logprobs import Asked, unpack
from dflash_core.prefixes import Prefixes, Snapshot
from dflash_core.protocols import Drafter, FeatureBlock, Target
from dflash_core.request import RowId, WindowId
from dflash_core.row import Row
from dflash_core.row_cache import FRESH, RowCaches, bucket_capacity, bucket_rows
from dflash_core.sampling import SamplingArrays, pack
from dflash_core.target import PromptScoring, Verdict

_SMALLEST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A row whose prompt is read, where its state lies, and its first token."""

    row: Row
    slot: int
    token: int
    is_finite: bool
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the first token, if the row asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0  # of a fresh row's, those that a saved prefix stood for


class PrefillBatch:
    """At most ``max_rows`` rows, prefilled together with a chunk of tokens per step."""

    def __init__(
        self,
        window_id: WindowId,
        target: Target,
        drafter: Drafter,
        *,
        max_rows: int,
        chunk: int,
        prefixes: Prefixes | None = None,
    ):
        self._window_id, self._target, self._drafter = window_id, target, drafter
        self._chunk = chunk
        self._prefixes = prefixes
        self.max_rows = max_rows
        self.rows: list[Row | None] = [None]
        self.caches: RowCaches = target.new_caches(1, bucket_capacity(chunk))
        self._first_capacity = self.caches.capacity
        self._sampling: SamplingArrays | None = None
        # Numbers [T, 1 + 2N] of prompts, chunk by chunk; on the device until the row is done.
        self._prompt_numbers: dict[RowId, list[mx.array]] = {}
        # What rows read so far are to leave behind, once they are known to be finite.
        self._snapshots: dict[RowId, list[Snapshot]] = {}
        self._began: dict[RowId, int] = {}  # the length that a saved prefix gave each

    @property
    def num_rows(self) -> int:
        """Rows being prefilled."""
        return sum(row is not None for row in self.rows)

    def add(self, row: Row) -> None:
        """Give a row a slot."""
        if None not in self.rows:
            layout = [*range(len(self.rows)), *([FRESH] * len(self.rows))]
            self.caches.arrange(layout, self._chunk)
            self.rows += [None] * (len(layout) - len(self.rows))
        slot = self.rows.index(None)
        self.rows[slot] = row
        self.caches.reset(slot)
        self._sampling = None
        if self._prefixes is not None:
            self._began[row.row_id] = self._prefixes.begin(self._window_id, row, self.caches, slot)

    def remove(self, row_id: RowId) -> bool:
        """Free a row's slot; whether it was here."""
        for slot, row in enumerate(self.rows):
            if row is not None and row.row_id == row_id:
                self.release(slot, scrub=True)  # nobody has looked yet whether it is finite
                return True
        return False

    def _free(self, slot: int) -> None:
        row = self.rows[slot]
        if row is not None:
            self._prompt_numbers.pop(row.row_id, None)
            self._snapshots.pop(row.row_id, None)
            self._began.pop(row.row_id, None)
        self.rows[slot] = None
        self.caches.lengths[slot] = 0

    def step(self) -> tuple[int, list[Prefilled]]:
        """Run one chunk of every row's prompt.

        Returns the number of prompt tokens read and the rows whose prompt is read whole; the caller
        copies each out and then calls ``release``. Blocks only if there are such rows.
        """
        slots = range(len(self.rows))
        to_stop = np.array([self._to_stop(slot) for slot in slots], dtype=np.int32)
        width = min(self._chunk, max(_SMALLEST_CHUNK, bucket_rows(int(to_stop.max(initial=0)))))
        counts = np.minimum(to_stop, width)
        is_last = np.array([self._remaining(slot) <= counts[slot] for slot in slots])
        tokens = np.zeros((len(self.rows), width), dtype=np.int32)
        starts = self.caches.lengths.copy()
        for slot, row in enumerate(self.rows):
            if row is not None:
                part = row.request.tokens[starts[slot] : starts[slot] + counts[slot]]
                tokens[slot, : len(part)] = part
        if self._sampling is None:
            sampled = [None if row is None else row.sampled() for row in self.rows]
            self._sampling = pack(sampled, self._target.vocab_size)
        scoring = self._scoring(starts, width)
        sampling = self._constrained(self._sampling, is_last)
        verdict = self._target.prefill(self.caches, tokens, counts, sampling, scoring)
        if scoring is not None:
            self._keep_numbers(scoring.asked, verdict, counts)
        row_ids = tuple(None if row is None else row.row_id for row in self.rows)
        self._drafter.extend(self._window_id, FeatureBlock(row_ids, starts, counts, verdict.features))
        self._take_snapshots()
        return int(counts.sum()), self._finished(verdict)

    def _take_snapshots(self) -> None:
        """Of the rows that stand where their request wants it; their last chunk need not be done."""
        if self._prefixes is None:
            return
        for slot, row in enumerate(self.rows):
            length = int(self.caches.lengths[slot])
            if row is not None and self._prefixes.is_wanted(row.request, self._began[row.row_id], length):
                snapshot = self._prefixes.take(self._window_id, row.row_id, self.caches, slot)
                if snapshot is not None:
                    self._snapshots.setdefault(row.row_id, []).append(snapshot)

    def keep_snapshots(self, row: Row) -> None:
        """The row was read whole and is finite: what was saved of it on the way may be used."""
        for snapshot in self._snapshots.pop(row.row_id, ()):
            assert self._prefixes is not None
            self._prefixes.keep(row.request.tokens, snapshot)

    def _constrained(self, sampling: SamplingArrays, is_last: np.ndarray) -> SamplingArrays:
        """With what grammars allow as first token, for rows whose chunk ``is_last`` [B]."""
        if not sampling.variant.is_masked:
            return sampling
        places = unconstrained(len(self.rows), 1, self._target.vocab_size)
        for slot, row in enumerate(self.rows):
            if row is not None and is_last[slot]:
                row.constrain(places[slot], ())
        return sampling.masked(places)

    def _finished(self, verdict: Verdict) -> list[Prefilled]:
        done = [
            (slot, row)
            for slot, row in enumerate(self.rows)
            if row is not None and self._remaining(slot) == 0
        ]
        if not done:
            return []
        outcome = verdict.read()
        return [
            Prefilled(
                row,
                slot,
                int(outcome.chosen[slot, 0]),
                bool(outcome.is_finite[slot]),
                outcome.logprobs(slot, row.request, 1),
                self._prompt_logprobs(row),
                self._num_cached(row),
            )
            for slot, row in done
        ]

    def _scoring(self, starts: np.ndarray, width: int) -> PromptScoring | None:
        """What follows each input of the rows whose prompt is to be measured."""
        num_tops = [
            row.request.num_top_logprobs if row is not None and row.request.wants_prompt_logprobs else None
            for row in self.rows
        ]
        asked = Asked.of(num_tops, self._target.vocab_size)
        if asked is None:
            return None
        following = np.zeros((bucket_rows(len(asked.slots)), width), dtype=np.int32)
        for line, slot in enumerate(asked.slots):
            row = self.rows[slot]
            assert row is not None
            part = row.request.tokens[starts[slot] + 1 : starts[slot] + 1 + width]
            following[line, : len(part)] = part
        return PromptScoring(asked, following)

    def _keep_numbers(self, asked: Asked, verdict: Verdict, counts: np.ndarray) -> None:
        assert verdict.prompt_numbers is not None
        for line, slot in enumerate(asked.slots):
            row = self.rows[slot]
            assert row is not None
            numbers = verdict.prompt_numbers[line, : int(counts[slot])]
            self._prompt_numbers.setdefault(row.row_id, []).append(numbers)

    def _prompt_logprobs(self, row: Row) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's second token and on; reading does not wait, the row's last chunk is done."""
        chunks = self._prompt_numbers.pop(row.row_id, [])
        if not chunks:
            return ()
        # Each by itself: how many candidates a chunk has depends on who else was measured with it.
        told = [n for chunk in chunks for n in unpack(np.array(chunk), row.request.num_top_logprobs or 0)]
        return tuple(told[: row.prompt_length - 1])

    def release(self, slot: int, *, scrub: bool) -> None:
        """Free the slot of a row that is done here; an empty batch shrinks to its first size.

        ``scrub`` zeroes what the row leaves behind, which may not be finite. The size counts: key lengths
        decide how sums round, and a row's bits must not depend on who was read before it.
        """
        self._free(slot)
        if scrub:
            self.caches.clear(slot)
        if self.num_rows == 0 and (len(self.rows) > 1 or self.caches.capacity > self._first_capacity):
            self.rows = [None]
            self.caches = self._target.new_caches(1, self._first_capacity)

    def _num_cached(self, row: Row) -> int:
        """None of a row that goes on here: its prompt had been read elsewhere before."""
        is_fresh = row.prompt_length == len(row.request.tokens)
        return self._began.get(row.row_id, 0) if is_fresh else 0

    def _to_stop(self, slot: int) -> int:
        """Tokens to the prompt's end, or to the next place where the row is to be saved."""
        row = self.rows[slot]
        if row is None or self._prefixes is None:
            return self._remaining(slot)
        length = int(self.caches.lengths[slot])
        return self._prefixes.next_stop(row.request, self._began[row.row_id], length) - length

    def _remaining(self, slot: int) -> int:
        row = self.rows[slot]
        return 0 if row is None else len(row.request.tokens) - int(self.caches.lengths[slot])
