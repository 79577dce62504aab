"""After any sequence of ragged rounds, each row's state is that of a row that ran alone."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.sampling import pack
from tests.core.engine_fixtures import (
    VOCAB,
    ListedWidths,
    RowState,
    alone,
    eager,
    finish,
    opened,
    progress_of,
    prompt,
    row,
    scripted,
    state_alone,
    tiny_drafter,
    tiny_lane,
)

WIDTHS = (1, 2, 4, 8, 16)
TOLERANCE = {mx.float64: 1e-9, mx.float32: 1e-4}


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


class Rows:
    """Rows driven round by round through both networks, with accepts and tokens as the test wants them."""

    def __init__(self, prompts: Sequence[Sequence[int]], dtype: mx.Dtype = mx.float64):
        self.target = tiny_lane(dtype).target
        parts = tiny_drafter(dtype)
        self.drafter, self.project = parts.network(), parts.projection()
        self.histories = [list(p) for p in prompts]
        counts = np.array([len(p) for p in prompts], dtype=np.int32)
        tokens = np.full((len(prompts), int(counts.max())), 3, dtype=np.int32)
        for b, p in enumerate(prompts):
            tokens[b, : len(p)] = p
        self.caches = self.target.new_caches(len(prompts), 1)
        self.contexts = parts.caches(len(prompts), 1)
        sampling = pack([None] * len(prompts), self.target.vocab_size)
        self._take(self.target.prefill(self.caches, tokens, counts, sampling).features, counts)

    def _take(self, x: mx.array, counts: np.ndarray) -> None:
        """Append features to the contexts."""
        self.contexts.reserve(x.shape[1])
        lengths, arrays = mx.array(self.contexts.lengths), self.contexts.take()
        keys, values = self.drafter.extend(x, lengths, arrays.keys, arrays.values)
        self._put(keys, values)
        self.contexts.lengths += counts

    def _put(self, keys: list[mx.array], values: list[mx.array]) -> None:
        self.contexts.put(type(self.caches.arrays)(keys, values, *self._no_state))

    @property
    def _no_state(self) -> tuple[mx.array, mx.array]:
        empty = tiny_drafter().caches(len(self.histories), 1).arrays
        return empty.states, empty.conv

    def play(self, tokens: np.ndarray, counts: np.ndarray, committed: np.ndarray | None = None) -> None:
        """Draft, verify ``tokens`` [B, K] and keep ``counts`` [B] of them.

        ``committed`` is what the recurrent commit is told instead: a deliberate fault.
        """
        width = tokens.shape[1]
        if width > 1:
            self.contexts.reserve(width)
            lengths, arrays = mx.array(self.contexts.lengths), self.contexts.take()
            anchors = mx.array(tokens[:, 0])
            _, keys, values = self.drafter.draft(anchors, lengths, width, arrays.keys, arrays.values)
            self._put(keys, values)
        self.caches.reserve(width)
        lengths, network = mx.array(self.caches.lengths), self.target.network
        _, features, arrays, journal = network.verify(mx.array(tokens), lengths, self.caches.take())
        kept = mx.array(counts if committed is None else committed)
        self.caches.put(network.commit(journal, arrays, kept))
        self.caches.lengths += counts
        self._take(self.project(features), counts)
        for b, n in enumerate(counts):
            self.histories[b] += tokens[b, :n].tolist()

    def differences(self) -> list[float]:
        """Per row, the largest difference of target state and drafter context from a row's that ran alone."""
        gaps = []
        for b, history in enumerate(self.histories):
            other = Rows([history], self.caches.shape.dtype)
            gap = RowState(self.caches, b).difference(RowState(other.caches, 0))
            gaps.append(max(gap, RowState(self.contexts, b).difference(RowState(other.contexts, 0))))
        return gaps


def random_tokens(rng: np.random.Generator, B: int, width: int) -> np.ndarray:
    return rng.integers(0, VOCAB - 1, (B, width)).astype(np.int32)


def play_drawn_rounds(data: st.DataObject, dtype: mx.Dtype) -> Rows:
    B = data.draw(st.integers(1, 8), label="B")
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=B, max_size=B), label="prompt lengths")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    rows = Rows([prompt(i, n) for i, n in enumerate(sizes)], dtype)
    for width in data.draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=5), label="widths"):
        counts = data.draw(st.lists(st.integers(0, width), min_size=B, max_size=B), label="kept")
        rows.play(random_tokens(rng, B, width), np.array(counts, dtype=np.int32))
    return rows


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_ragged_rounds_leave_each_row_as_if_alone(data: st.DataObject) -> None:
    rows = play_drawn_rounds(data, mx.float64)
    assert max(rows.differences()) < TOLERANCE[mx.float64]


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_ragged_rounds_leave_each_row_as_if_alone_in_float32(data: st.DataObject) -> None:
    rows = play_drawn_rounds(data, mx.float32)
    assert max(rows.differences()) < TOLERANCE[mx.float32]


def test_extreme_accepts_side_by_side_for_many_rounds() -> None:
    """Rows that keep nothing, the anchor alone, all (of one word repeated), and anything between."""
    rng = np.random.default_rng(0)
    rows = Rows([prompt(1, 1), prompt(2, 17), (9,) * 30, prompt(4, 5)])
    for width in (8, 16, 1, 8, 2, 16, 4):
        tokens = random_tokens(rng, 4, width)
        tokens[2] = 9
        counts = [0, 1, width, int(rng.integers(1, width + 1))]
        rows.play(tokens, np.array(counts, dtype=np.int32))
    assert rows.caches.lengths.tolist()[:3] == [1, 17 + 7, 30 + 55]
    assert max(rows.differences()) < TOLERANCE[mx.float64]


@pytest.mark.parametrize("fault", [-1, 1])
def test_a_commit_off_by_one_in_one_row_is_detected_there_and_only_there(fault: int) -> None:
    """The control of the tests above."""
    rng = np.random.default_rng(1)
    rows = Rows([prompt(b, 4 + b) for b in range(4)])
    counts = np.array([4, 2, 5, 3], dtype=np.int32)
    wrong = counts + np.array([0, 0, fault, 0], dtype=np.int32)
    rows.play(random_tokens(rng, 4, 8), counts, committed=wrong)
    rows.play(random_tokens(rng, 4, 8), counts)
    gaps = rows.differences()
    assert gaps[2] > 1e-2
    assert max(gaps[:2] + gaps[3:]) < TOLERANCE[mx.float64]


def test_a_length_off_by_one_in_one_row_is_detected() -> None:
    """The other control: keys at the wrong rope position and slot."""
    rng = np.random.default_rng(2)
    rows = Rows([prompt(b, 6) for b in range(2)])
    rows.caches.lengths[1] += 1
    rows.play(random_tokens(rng, 2, 4), np.array([3, 3], dtype=np.int32))
    rows.caches.lengths[1] -= 1
    gaps = rows.differences()
    assert gaps[1] > 1e-2
    assert gaps[0] < TOLERANCE[mx.float64]


# The same through a window: its host-side bookkeeping too.


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_window_of_any_accepts_and_widths_keeps_every_rows_state(data: st.DataObject) -> None:
    lane = tiny_lane()
    sizes = data.draw(st.sets(st.sampled_from((1, 2, 9, 16, 17, 30)), min_size=2), label="prompt lengths")
    requests = [row(f"r{n}", prompt(n, n), 16) for n in sorted(sizes)]
    widths = data.draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=4), label="widths")
    accepts = data.draw(st.lists(st.integers(0, 16), min_size=7, max_size=7), label="right drafts")

    def num_right(row_id: str, length: int) -> int:
        return accepts[(length + 3 * int(row_id[1:])) % len(accepts)]

    with opened(
        lane,
        *requests,
        width=ListedWidths(widths),
        drafter=scripted(lane, requests, num_right),
        prefill_rows=8,
    ) as window:
        said: dict[str, list[int]] = {r.row_id: list(r.tokens) for r in requests}
        for _ in range(3):
            for progress in window.step().rows:
                said[progress.row_id] += progress.tokens
        for slot, live in enumerate(window.rows):
            if live is not None:
                tokens = said[live.row_id][: window.caches.lengths[slot]]
                assert len(said[live.row_id]) == len(tokens) + 1  # the anchor is not run yet
                assert live.anchor == said[live.row_id][-1]
                gap = RowState(window.caches, slot).difference(state_alone(lane.target, tokens))
                assert gap < TOLERANCE[mx.float64]
        reports = finish(window)
    for request in requests:
        later = [t for p in progress_of(reports, request.row_id) for t in p.tokens]
        assert (*said[request.row_id], *later) == (*request.tokens, *alone(lane, request))
