"""What the engine's tests share: tiny lanes, rows, drafters that follow a script, windows played out.

Most tests run eagerly: MLX compiles its fused kernels with g++, which costs more than the tests themselves.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from dflash_core.checkpoints import (
    DrafterSpec,
    EmbeddingAndHead,
    load_drafter_weights,
    load_embedding_and_head,
    read_drafter_spec,
    read_target_spec,
)
from dflash_core.drafter import LocalDrafter
from dflash_core.events import RoundReport, RowProgress
from dflash_core.loading import LoadedLane, drafter_shape, load_lane
from dflash_core.models.drafter import DrafterNetwork, FeatureProjection
from dflash_core.protocols import Drafter, Drafts, FeatureBlock, Ready
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.row import cut
from dflash_core.row_cache import CacheShape, RowCaches
from dflash_core.sampling import pack
from dflash_core.target import Target
from dflash_core.width import FixedWidth, WidthPolicy
from dflash_core.window import Window, WindowPolicy
from tests.core.tiny_checkpoints import edit_weights, write_drafter, write_target

VOCAB = 128
WINDOW = WindowId("window")
Layout = Literal["first", "today"]
TINY: dict[str, Any] = {
    "num_layers": 4,
    "interval": 2,
    "hidden": 32,
    "intermediate": 64,
    "vocab": VOCAB,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_dim": 16,
}
TINY_DRAFTER: dict[str, Any] = {
    "intermediate": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "block_size": 16,
}


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions operation by operation."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@cache
def tiny_lane(dtype: mx.Dtype = mx.float64, layout: Layout = "today") -> LoadedLane:
    """A random target and drafter of 4 and 2 layers, shared by all tests."""
    return make_lane(dtype, layout)


def make_lane(
    dtype: mx.Dtype = mx.float64,
    layout: Layout = "today",
    poisoned_token: int | None = None,
    drafter: Mapping[str, Any] | None = None,
    packed: bool | None = None,
    **target: Any,
) -> LoadedLane:
    """A lane of its own. The embedding of ``poisoned_token`` is NaN (the head is then a separate one)."""
    with tempfile.TemporaryDirectory() as folder:
        path, drafter_path = write_pair(Path(folder), layout, drafter, tied=poisoned_token is None, **target)
        if poisoned_token is not None:
            edit_weights(path, lambda weights: _poison(weights, poisoned_token))
        with patch("dflash_core.checkpoints.target._require_finite") if poisoned_token else nullcontext():
            return load_lane(path, drafter_path, dtype=dtype, packed=packed)


def write_pair(
    folder: Path, layout: Layout, drafter: Mapping[str, Any] | None = None, **target: Any
) -> tuple[Path, Path]:
    """Write the tiny target and its drafter in float32."""
    path = write_target(folder / "target", **{**TINY, "dtype": mx.float32, **target})
    return path, write_drafter(
        folder / "drafter",
        target=path,
        layout=layout,
        dtype=mx.float32,
        **{**TINY_DRAFTER, **(drafter or {})},
    )


def _poison(weights: dict[str, mx.array], token: int) -> None:
    name = "model.embed_tokens.weight"
    is_token = mx.arange(weights[name].shape[0]) == token
    weights[name] = mx.where(is_token[:, None], mx.array(mx.nan), weights[name])


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter is made of, for tests that run its network by hand. Same weights as ``tiny_lane``'s."""

    spec: DrafterSpec
    weights: dict[str, mx.array]
    shared: EmbeddingAndHead

    def network(self, head: Callable[[mx.array], mx.array] | None = None) -> DrafterNetwork:
        """The network; ``head`` stands in for the target's."""
        return DrafterNetwork(
            drafter_shape(self.spec), self.weights, self.shared.embed, head or self.shared.logits
        )

    def projection(self) -> FeatureProjection:
        """``fc`` and ``hidden_norm``."""
        return FeatureProjection(self.weights, self.spec.rms_norm_eps)

    def caches(self, num_slots: int, capacity: int) -> RowCaches:
        """Empty contexts."""
        shape = CacheShape(
            num_attention_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            num_delta_layers=0,
            num_v_heads=0,
            v_dim=0,
            k_dim=0,
            conv_window=0,
            conv_dim=0,
            dtype=self.shared.dtype,
            state_dtype=self.shared.dtype,
        )
        return RowCaches(shape, num_slots, capacity)


@cache
def tiny_drafter(dtype: mx.Dtype = mx.float64, layout: Layout = "today") -> DrafterParts:
    """The drafter of ``tiny_lane`` in parts."""
    with tempfile.TemporaryDirectory() as folder:
        path, drafter = write_pair(Path(folder), layout)
        spec = read_drafter_spec(drafter, read_target_spec(path))
        return DrafterParts(
            spec,
            load_drafter_weights(drafter, spec, dtype),
            load_embedding_and_head(path, dtype=dtype),
        )


# Rows and windows


def row(
    name: str,
    tokens: Sequence[int],
    max_tokens: int = 12,
    *,
    stop: Sequence[int] = (),
    **sampling: Any,
) -> RowRequest:
    """A request; keyword arguments are its sampling."""
    return RowRequest(RowId(name), tuple(tokens), max_tokens, Sampling(**sampling), frozenset(stop))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens, never the mask token (the vocabulary's last)."""
    return tuple(np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist())


def open_window(
    lane: LoadedLane,
    *,
    width: int | WidthPolicy = 8,
    drafter: Drafter | None = None,
    window_id: WindowId = WINDOW,
    **policy: Any,
) -> Window:
    """A window on a lane; ``drafter`` stands in for the lane's own."""
    chooser = FixedWidth(width) if isinstance(width, int) else width
    return Window(window_id, lane.target, drafter or lane.drafter, WindowPolicy(width=chooser, **policy))


@contextmanager
def opened(lane: LoadedLane, *requests: RowRequest, **arguments: Any) -> Iterator[Window]:
    """A window with rows admitted, closed afterwards."""
    window = open_window(lane, **arguments)
    try:
        for request in requests:
            window.admit(request)
        yield window
    finally:
        window.close()


def finish(window: Window, limit: int = 500) -> list[RoundReport]:
    """Play until nothing is left to do."""
    reports: list[RoundReport] = []
    while window.has_work:
        reports.append(window.step())
        assert len(reports) < limit, "the window makes no progress"
    return reports


def progress_of(reports: Sequence[RoundReport], name: str) -> list[RowProgress]:
    """What one row was told, in order."""
    return [progress for report in reports for progress in report.rows if progress.row_id == name]


def tokens_of(reports: Sequence[RoundReport]) -> dict[str, tuple[int, ...]]:
    """All tokens that each row emitted."""
    emitted: dict[str, tuple[int, ...]] = {}
    for report in reports:
        for progress in report.rows:
            emitted[progress.row_id] = emitted.get(progress.row_id, ()) + progress.tokens
    return emitted


def play(lane: LoadedLane, *requests: RowRequest, **arguments: Any) -> dict[str, tuple[int, ...]]:
    """Tokens of every row, played together in a fresh window."""
    with opened(lane, *requests, **arguments) as window:
        reports = finish(window)
    assert all(p.error is None for report in reports for p in report.rows)
    return tokens_of(reports)


_SPOKEN: dict[tuple[int, tuple[int, ...], Sampling], tuple[int, ...]] = {}  # the longest answer so far
_LANES: list[LoadedLane] = []  # kept, so that no id is used twice


def alone(lane: LoadedLane, request: RowRequest) -> tuple[int, ...]:
    """The row's tokens in a window of its own, without a drafter: what every other way must give."""
    key = (id(lane), request.tokens, request.sampling)
    if len(_SPOKEN.get(key, ())) < request.max_tokens:
        endless = replace(request, stop_token_ids=frozenset())
        _SPOKEN[key] = play(lane, endless, width=1, drafter=SilentDrafter())[request.row_id]
        _LANES.append(lane)
    return cut(_SPOKEN[key], request.max_tokens, request.stop_token_ids)[0]


# Widths and drafts at will


class ListedWidths:
    """Plays the listed widths in turn, again and again."""

    def __init__(self, widths: Sequence[int]):
        self._widths = widths
        self._round = 0

    def choose(self, row_ids: Sequence[RowId | None], widest: int) -> int:
        self._round += 1
        return min(widest, self._widths[(self._round - 1) % len(self._widths)])

    def observe(self, report: RoundReport) -> None:
        pass

    def forget(self, row_id: RowId) -> None:
        pass


class SilentDrafter:
    """Never drafts and keeps nothing: every round is classic."""

    block_size = 1

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        pass

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        return Ready(Drafts(mx.zeros((len(block.row_ids), 0), dtype=mx.int32), has_taken=True))

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        pass

    def close(self, window_id: WindowId) -> None:
        pass


NumRight = Callable[[str, int], int]  # (row id, target length) -> drafts that shall be right


class ScriptedDrafter:
    """Keeps the real contexts, but drafts what a script says: so many right tokens, then wrong ones.

    ``scripts`` holds each row's prompt and output; ``salt`` changes the wrong tokens only, none of which is
    ``avoid``.
    """

    def __init__(
        self,
        inner: Drafter,
        scripts: Mapping[RowId, Sequence[int]],
        num_right: NumRight | int,
        *,
        salt: int = 0,
        avoid: int | None = None,
    ):
        self._inner, self._scripts, self._salt, self._avoid = inner, scripts, salt, avoid
        self._num_right = num_right if callable(num_right) else lambda _row, _length: num_right
        self.calls: list[tuple[FeatureBlock, int]] = []
        self.own: list[np.ndarray] = []  # what the real drafter would have said, per call

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        self._inner.extend(window_id, block)

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        self.calls.append((block, width))
        drafts = self._inner.draft(window_id, block, anchors, width).wait()
        ids = np.array(drafts.ids)
        self.own.append(ids.copy())
        lengths = block.starts + block.counts
        for slot, row_id in enumerate(block.row_ids):
            if row_id is not None and ids.shape[1]:
                ids[slot] = self._follow(row_id, int(lengths[slot]), ids.shape[1])
        return Ready(Drafts(mx.array(ids, dtype=mx.int32), drafts.has_taken))

    def _follow(self, row_id: RowId, length: int, count: int) -> list[int]:
        ahead = [*self._scripts[row_id][length + 1 :], *([0] * count)][:count]
        right = self._num_right(row_id, length)
        return [t if i < right else self._other(t) for i, t in enumerate(ahead)]

    def _other(self, token: int) -> int:
        other = (token + 1 + self._salt) % VOCAB
        return other if other != self._avoid else (other + 1) % VOCAB

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        self._inner.drop(window_id, row_ids)

    def close(self, window_id: WindowId) -> None:
        self._inner.close(window_id)


def scripted(
    lane: LoadedLane, requests: Sequence[RowRequest], num_right: NumRight | int, **arguments: Any
) -> ScriptedDrafter:
    """A drafter that knows what each request's row will say."""
    scripts = {r.row_id: (*r.tokens, *alone(lane, r)) for r in requests}
    return ScriptedDrafter(lane.drafter, scripts, num_right, **arguments)


# State


class RowState:
    """Everything a target keeps of one row, as numpy arrays cut to its length."""

    def __init__(self, caches: RowCaches, slot: int):
        length = int(caches.lengths[slot])
        arrays = caches.arrays
        self.length = length
        self.parts = {
            "keys": [as_numpy(k[slot, :, :length]) for k in arrays.keys],
            "values": [as_numpy(v[slot, :, :length]) for v in arrays.values],
            "states": [as_numpy(arrays.states[:, slot])],
            "conv": [as_numpy(arrays.conv[:, slot])],
        }

    def difference(self, other: "RowState") -> float:
        """Largest difference of any number; infinite if the shapes or finiteness differ."""
        if self.length != other.length:
            return float("inf")
        gaps = [
            difference(a, b)
            for name in self.parts
            for a, b in zip(self.parts[name], other.parts[name], strict=True)
        ]
        return max(gaps)


def as_numpy(x: mx.array) -> np.ndarray:
    """The same numbers; numpy has no bfloat16."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference of two arrays; infinite if either is not finite."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max(initial=0.0))


def state_alone(target: Target, tokens: Sequence[int]) -> RowState:
    """State of a row that read ``tokens`` by itself, in one piece."""
    caches = target.new_caches(1, 1)
    counts = np.array([len(tokens)], dtype=np.int32)
    target.prefill(caches, np.array([tokens], dtype=np.int32), counts, pack([None], target.vocab_size))
    return RowState(caches, 0)


def local(lane: LoadedLane) -> LocalDrafter:
    """The lane's own drafter, for tests that look at its contexts."""
    assert isinstance(lane.drafter, LocalDrafter)
    return lane.drafter
