"""Memory: no copy of the caches in a round, exact bytes per row, nothing kept of rows that left."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.loading import LoadedLane, load_lane, target_cache_shape
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.protocols import FeatureBlock
from dflash_core.request import RowId, WindowId
from dflash_core.row_cache import CacheShape, RowCaches, bucket_capacity, bucket_rows
from dflash_core.sampling import pack
from dflash_core.target import BlockInput, Target
from tests.core.engine_fixtures import (
    WINDOW,
    eager,
    finish,
    local,
    make_lane,
    opened,
    prompt,
    row,
    scripted,
    tiny_lane,
)

LONG = 16_000


def peak_of(action: Callable[[], object]) -> int:
    """Bytes in use at the action's height beyond those before it."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    return mx.get_peak_memory() - before


def long_caches(target: Target, num_slots: int = 2) -> RowCaches:
    """Evaluated caches of 16k tokens a row, one row nearly full and one of length 1."""
    caches = target.new_caches(num_slots, LONG)
    mx.eval(caches.arrays.keys, caches.arrays.values, caches.arrays.states, caches.arrays.conv)
    caches.lengths[0], caches.lengths[1] = LONG - 200, 1
    return caches


def play_rounds_of(target: Target, caches: RowCaches, width: int) -> None:
    """Three rounds: what one holds, the next would have to copy."""
    block = BlockInput(
        mx.array([5, 6], dtype=mx.int32),
        np.array([50, 50], dtype=np.int32),
        pack([None, None], target.vocab_size),
    )
    for _ in range(3):
        outcome = target.verify(caches, block, mx.zeros((2, width - 1), dtype=mx.int32), "per_row").read()
        caches.lengths += (outcome.accepted + 1).astype(np.int32)


@pytest.fixture(scope="module")
def wide_lane() -> LoadedLane:
    """Few heads and wide ones, so that caches outweigh scores as in a real model."""
    wide: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 128}
    return make_lane(mx.float32, drafter=wide, max_context=32_768, **wide)


@pytest.mark.parametrize("width", [1, 8])
def test_a_round_at_16k_does_not_copy_the_caches(wide_lane: LoadedLane, width: int) -> None:
    with eager():
        caches = long_caches(wide_lane.target)
        one_array = caches.arrays.keys[0].nbytes
        assert peak_of(lambda: play_rounds_of(wide_lane.target, caches, width)) < 0.9 * one_array


def test_a_reference_held_across_a_round_costs_a_copy(wide_lane: LoadedLane) -> None:
    """The control, and the reason why caches are taken and put back."""
    with eager():
        caches = long_caches(wide_lane.target)
        one_array = caches.arrays.keys[0].nbytes
        held = caches.arrays.keys[0]
        assert peak_of(lambda: play_rounds_of(wide_lane.target, caches, 1)) > one_array
        assert held.shape[2] == LONG


def test_a_compiled_round_at_16k_does_not_copy_the_caches() -> None:
    target = load_lane(TARGET, DRAFTER).target
    caches = long_caches(target)
    assert peak_of(lambda: play_rounds_of(target, caches, 1)) < 0.1 * caches.num_bytes


def test_a_draft_at_16k_does_not_copy_the_contexts(wide_lane: LoadedLane) -> None:
    window, chunk = WindowId("long"), 2000
    spec = wide_lane.drafter_spec
    names = (RowId("a"), RowId("b"))
    one_array = 2 * LONG * spec.num_kv_heads * spec.head_dim * 4

    def block(start: int, counts: tuple[int, int], T: int) -> FeatureBlock:
        starts = np.array([start, min(start, 1)], dtype=np.int32)
        return FeatureBlock(
            names, starts, np.array(counts, dtype=np.int32), mx.ones((2, T, spec.hidden_size))
        )

    def draft() -> None:
        anchors = mx.array([7, 8], dtype=mx.int32)
        mx.eval(wide_lane.drafter.draft(window, block(LONG, (0, 0), 1), anchors, 2).wait().ids)

    with eager():
        for start in range(0, LONG, chunk):
            wide_lane.drafter.extend(window, block(start, (chunk, 1 if start == 0 else 0), chunk))
        draft()
        assert peak_of(draft) < 0.9 * one_array
        wide_lane.drafter.close(window)


# Bytes


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float64, mx.bfloat16], ids=["float32", "float64", "bfloat16"]
)
@pytest.mark.parametrize(("slots", "capacity"), [(1, 128), (4, 384)])
def test_bytes_per_row_are_those_of_the_arrays(dtype: mx.Dtype, slots: int, capacity: int) -> None:
    shape: CacheShape = target_cache_shape(tiny_lane().target_spec, dtype)
    caches = RowCaches(shape, slots, capacity)
    arrays = caches.arrays
    held = sum(x.nbytes for x in (*arrays.keys, *arrays.values, arrays.states, arrays.conv))
    assert caches.num_bytes == held == slots * shape.bytes_per_row(capacity)
    assert (caches.num_slots, caches.capacity) == (slots, capacity)


def test_buckets_hold_what_they_must_and_waste_at_most_half() -> None:
    for n in (1, 127, 128, 129, 192, 193, 255, 257, 3000, 16_001):
        assert n <= bucket_capacity(n) <= max(128, 1.5 * n)
    assert [bucket_rows(n) for n in (0, 1, 2, 3, 4, 5, 9, 16)] == [1, 1, 2, 4, 4, 8, 16, 16]


def test_caches_grow_in_steps_and_keep_their_rows() -> None:
    target = tiny_lane().target
    caches = target.new_caches(2, 1)
    caches.reserve(1)
    sizes = set()
    with eager():
        for _ in range(30):
            counts = np.array([16, 3], dtype=np.int32)
            target.prefill(caches, np.full((2, 16), 5, dtype=np.int32), counts, pack([None] * 2, 128))
            sizes.add(caches.capacity)
            assert caches.lengths.max() <= caches.capacity
    assert len(sizes) <= 5
    assert caches.lengths.tolist() == [480, 90]


def test_a_capacity_is_never_exceeded() -> None:
    caches = tiny_lane().target.new_caches(2, 1)
    caches.lengths[1] = 500  # an idle slot's length counts as well
    caches.reserve(16)
    assert caches.capacity >= 516


# Leaving


@pytest.fixture
def _eager() -> Iterator[None]:
    with eager():
        yield


@pytest.mark.usefixtures("_eager")
def test_caches_shrink_when_rows_leave() -> None:
    requests = [row("long", prompt(1, 200), 4), row("a", prompt(2, 4), 9), row("b", prompt(3, 4), 30)]
    drafter = scripted(tiny_lane(), requests, 0)
    with opened(tiny_lane(), *requests, drafter=drafter) as window:
        sizes = []
        while window.has_work:
            window.step()
            sizes.append((window.caches.num_slots, window.caches.capacity, window.caches.num_bytes))
    assert max(sizes)[:2] >= (4, 256)
    assert sizes[-1][:2] == (1, 128)
    assert sizes[-1][2] * 6 < max(size for _, _, size in sizes)


@pytest.mark.usefixtures("_eager")
def test_nothing_stays_of_a_window_that_is_gone() -> None:
    lane = tiny_lane(mx.float32)
    requests = [row(f"r{n}", prompt(n, n), 12) for n in (5, 60, 130)]
    drafter = scripted(lane, requests, 3)

    def play() -> None:
        with opened(lane, *requests, drafter=drafter) as window:
            finish(window)

    play()
    drafter.calls.clear()
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(3):
        play()
        drafter.calls.clear()
    gc.collect()
    assert mx.get_active_memory() - before < 4096


@pytest.mark.usefixtures("_eager")
def test_waiting_features_do_not_pile_up_in_a_classic_window() -> None:
    """They are handed over before they outgrow a forward of their own."""
    request = row("r", prompt(1, 5), 150)
    with opened(tiny_lane(), request, width=1) as window:
        waiting = []
        while window.has_work:
            window.step()
            waiting.append(int(window.plan().features.counts.max()))
    assert len(waiting) == 149
    assert 30 < max(waiting) <= 64


@pytest.mark.usefixtures("_eager")
def test_bytes_per_row_are_bounded_by_its_length_in_target_context_and_waiting_features() -> None:
    """By the longest row since slots were last laid out; one row left is held to its own length again."""
    lane = tiny_lane(mx.float32)
    requests = [row("long", prompt(1, 200), 30)] + [row(f"r{n}", prompt(n, n), 20 + n) for n in (3, 40, 90)]
    drafter = scripted(lane, requests, lambda name, length: (length + len(name)) % 5)
    shape, block = lane.target.cache_shape, lane.drafter.block_size
    seen, peak, before = set[int](), 0, 0
    with opened(lane, *requests, width=8, drafter=drafter) as window:
        while window.has_work:
            window.step()
            if not window.num_live:
                continue
            slots, longest = len(window.rows), int(window.caches.lengths.max())
            peak = max(longest, peak if slots == before else 0)
            before = slots
            bucket = bucket_capacity(peak + 2 * block)
            contexts = local(lane)._sessions[WINDOW].live.caches
            assert window.caches.num_bytes <= slots * shape.bytes_per_row(bucket)
            assert contexts.num_bytes <= slots * contexts.shape.bytes_per_row(bucket)
            waiting = window._waiting.merged()[0]
            assert waiting.nbytes <= slots * 64 * lane.target.feature_size * waiting.itemsize
            seen.add(slots)
    assert seen >= {1, 4}


def test_a_row_of_four_billion_parameters_costs_what_its_parts_do() -> None:
    """Qwen3.5-4B in bfloat16: 32 KiB a token (8 layers), 49 MiB of recurrent state (24 layers)."""
    shape = CacheShape(
        num_attention_layers=8,
        num_kv_heads=4,
        head_dim=256,
        num_delta_layers=24,
        num_v_heads=32,
        v_dim=128,
        k_dim=128,
        conv_window=3,
        conv_dim=8192,
        dtype=mx.bfloat16,
        state_dtype=mx.float32,
    )
    per_token = (shape.bytes_per_row(2048) - shape.bytes_per_row(1024)) / 1024
    assert per_token == 32 * 1024
    assert shape.bytes_per_row(0) == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
