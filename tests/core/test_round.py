"""One round: its phases, its single blocking read, and drafters that have nothing to say."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.events import RoundReport
from dflash_core.protocols import Drafter, Drafts, FeatureBlock, Ready, Target
from dflash_core.request import RowId, WindowId
from dflash_core.round import play_round
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from tests.core.engine_fixtures import (
    WINDOW,
    ListedWidths,
    alone,
    eager,
    finish,
    local,
    opened,
    prompt,
    row,
    tiny_lane,
    tokens_of,
)

REQUESTS = (
    row("a", prompt(1, 5), 40),
    row("b", prompt(2, 12), 40),
    row("c", prompt(3, 30), 40),
)
SAMPLED = row("sampled", prompt(4, 8), 40, temperature=0.9, top_k=20, seed=3)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


# Host reads


class CountingNumpy:
    """numpy, counting conversions of device arrays."""

    def __init__(self, reads: Counter[str]):
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if name not in ("array", "asarray", "ascontiguousarray", "stack", "concatenate", "where"):
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._reads[f"np.{name}"] += any(isinstance(arg, mx.array) for arg in args)
            return value(*args, **kwargs)

        return counted


@contextmanager
def counting_reads(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts everything by which the engine could wait for the device."""
    reads: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return function(*args, **kwargs)

        return call

    with patch.context() as inner:
        for name, module in list(sys.modules.items()):
            if name.startswith("dflash_core") and getattr(module, "np", None) is np:
                inner.setattr(module, "np", CountingNumpy(reads))
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__iter__"):
            inner.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
        for name in ("eval", "synchronize"):
            inner.setattr(mx, name, counted(name, getattr(mx, name)))
        yield reads


@pytest.mark.parametrize("width", [1, 2, 8, 16])
@pytest.mark.parametrize("extra", [(), (SAMPLED,)], ids=["greedy", "mixed"])
def test_a_round_reads_from_the_device_once(
    width: int, extra: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_lane(), *REQUESTS, *extra, width=width) as window:
        window.step()
        with counting_reads(monkeypatch) as reads:
            for _ in range(3):
                window.step()
        assert window.num_live == 3 + len(extra)
    assert reads.total() == 3, reads


def test_taking_piled_up_features_costs_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = ListedWidths((1, 1, 1, 8))
    with opened(tiny_lane(), *REQUESTS, width=widths) as window:
        window.step()
        with counting_reads(monkeypatch) as reads:
            reports = [window.step() for _ in range(8)]
    assert {report.width for report in reports} == {1, 8}
    assert reads.total() == 8, reads


def test_a_chunk_of_a_prompt_adds_no_read_and_its_end_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_lane(), REQUESTS[0], prefill_chunk=16) as window:
        window.step()
        window.admit(REQUESTS[2])  # 30 tokens: two chunks
        with counting_reads(monkeypatch) as reads:
            first = window.step()
            assert (first.prefilled_tokens, reads.total()) == (16, 1)
            second = window.step()
            assert (second.prefilled_tokens, second.live_rows, reads.total()) == (14, 2, 3)


def test_the_counter_sees_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an engine that looked at its arrays would be caught."""
    from dflash_core import window as module

    with counting_reads(monkeypatch) as reads:
        x = mx.array([1, 2])
        module.np.array(x)
        module.np.array([1, 2])
        x.tolist()
        int(x[0])
        mx.eval(x)
    assert reads == {"np.array": 1, "tolist": 1, "__int__": 1, "eval": 1}


# Phases


def test_a_round_is_a_draft_then_a_verify_then_a_commit() -> None:
    with opened(tiny_lane(), *REQUESTS) as window:
        window.step()
        lengths, waiting = window.caches.lengths.copy(), window.plan().features.counts.copy()
        assert waiting.max() > 0
        played = play_round(window)
        assert played.width == 8
        assert set(played.seconds) == {"draft", "verify", "commit"}
        kept = np.array([p.accepted + 1 for p in played.rows])
        assert (window.caches.lengths[:3] - lengths[:3] == kept).all()
        assert (window.plan().features.counts[:3] == kept).all()  # the old ones went out with the draft


def test_classic_is_the_same_round_at_width_one() -> None:
    with opened(tiny_lane(), *REQUESTS, width=1) as window:
        reports = [window.step() for _ in range(3)]
        assert [report.width for report in reports] == [1, 1, 1]
        assert all((p.drafted, p.walked, p.accepted) == (0, 0, 0) for r in reports for p in r.rows)
        assert [len(p.tokens) for p in reports[-1].rows] == [1, 1, 1]


# The target


class OnlyTheProtocol:
    """A target of which nobody can ask more than ``Target`` says."""

    def __init__(self, inner: Target):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        assert name in vars(Target), f"{name} is not in the protocol"
        return getattr(self._inner, name)


def test_the_loop_asks_no_more_of_a_target_than_the_protocol_says() -> None:
    requests = (*REQUESTS, SAMPLED, replace(row("counted", prompt(5, 9), 6), num_top_logprobs=2))
    lane = tiny_lane()
    narrow = cast(Target, OnlyTheProtocol(lane.target))
    window = Window(WINDOW, narrow, lane.drafter, WindowPolicy(width=FixedWidth(8)))
    for request in requests:
        window.admit(request)
    window.begin()
    assert tokens_of(finish(window)) == {r.row_id: alone(lane, r) for r in requests}
    window.close()


# Drafters that stall


class StallingDrafter:
    """Answers with nothing, taking nothing, whenever ``is_down``; as an adapter whose peer is away."""

    def __init__(self, inner: Drafter, is_down: Callable[[int], bool]):
        self._inner, self._is_down = inner, is_down
        self.num_calls = 0
        self.block_size = inner.block_size

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        self._inner.extend(window_id, block)

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Any:
        self.num_calls += 1
        if self._is_down(self.num_calls):
            return Ready(Drafts(mx.zeros((len(block.row_ids), 0), dtype=mx.int32), has_taken=False))
        return self._inner.draft(window_id, block, anchors, width)

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        self._inner.drop(window_id, row_ids)

    def close(self, window_id: WindowId) -> None:
        self._inner.close(window_id)


def assert_contexts(window: Window) -> None:
    lengths, block = local(tiny_lane()).context_lengths(WINDOW), window.plan().features
    for slot, live in enumerate(window.rows):
        if live is not None:
            assert lengths[live.row_id] == block.starts[slot]
            assert block.starts[slot] + block.counts[slot] == window.caches.lengths[slot]


@pytest.mark.parametrize(
    "is_down",
    [lambda n: True, lambda n: n > 2, lambda n: 3 <= n < 12, lambda n: n % 2 == 0],
    ids=["always", "dies", "comes back", "every other round"],
)
def test_rows_go_on_classic_while_the_drafter_is_away(is_down: Callable[[int], bool]) -> None:
    drafter = StallingDrafter(tiny_lane().drafter, is_down)
    with opened(tiny_lane(), *REQUESTS, drafter=drafter) as window:
        reports: list[RoundReport] = []
        for number in range(1, 20):
            reports.append(window.step())
            assert drafter.num_calls == number
            assert reports[-1].width == (1 if is_down(number) else 8)
            assert_contexts(window)
        reports += finish(window)
    assert tokens_of(reports) == {r.row_id: alone(tiny_lane(), r) for r in REQUESTS}


def test_a_round_can_be_played_again_after_the_drafter_refused_it() -> None:
    """An error before the verify leaves the window as it was."""

    class Refusing(StallingDrafter):
        def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Any:
            self.num_calls += 1
            if self._is_down(self.num_calls):
                raise ConnectionError
            return self._inner.draft(window_id, block, anchors, width)

    drafter = Refusing(tiny_lane().drafter, lambda n: n in (2, 5))
    with opened(tiny_lane(), *REQUESTS, drafter=drafter) as window:
        reports: list[RoundReport] = []
        refused = 0
        while window.has_work:
            try:
                reports.append(window.step())
            except ConnectionError:
                refused += 1
    assert refused == 2
    assert tokens_of(reports) == {r.row_id: alone(tiny_lane(), r) for r in REQUESTS}
