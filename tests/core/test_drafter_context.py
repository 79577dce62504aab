"""The draft network against a plain one-row forward, and per-row contexts through joins, waits and losses."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.checkpoints import read_drafter_spec, read_target_spec
from dflash_core.errors import WindowLost
from dflash_core.protocols import FeatureBlock
from dflash_core.request import RowId, WindowId
from tests.core.engine_fixtures import (
    WINDOW,
    DrafterParts,
    Layout,
    ListedWidths,
    alone,
    difference,
    eager,
    local,
    opened,
    prompt,
    row,
    scripted,
    tiny_drafter,
    tiny_lane,
    tokens_of,
    write_pair,
)
from tests.core.tiny_checkpoints import edit_config

HIDDEN = 32
LAYOUTS = pytest.mark.parametrize("layout", ["first", "today"])


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


# The reference: one row, the whole context at once, as the paper says it


class Reference:
    """DFlash in numpy: context and block keys side by side, nothing cached."""

    scale = 1.0  # of the block's embeddings

    def __init__(self, parts: DrafterParts):
        self.spec = parts.spec
        self.weights = {name: np.array(w) for name, w in parts.weights.items()}
        self.embedding = np.array(parts.shared.embedding.weight)

    def logits(self, context: np.ndarray, anchor: int, width: int, **masks: Any) -> np.ndarray:
        """Logits [width - 1, V] after ``context`` [n, D] and ``anchor`` at position n."""
        spec = self.spec
        h = self.scale * self.embedding[[anchor] + [spec.mask_token_id] * (width - 1)]
        for layer in range(spec.num_layers):
            h = h + self._attend(layer, context, self._norm(h, f"layers.{layer}.input_layernorm"), **masks)
            x = self._norm(h, f"layers.{layer}.post_attention_layernorm")
            gate, up = (self._linear(x, f"layers.{layer}.mlp.{n}_proj") for n in ("gate", "up"))
            h = h + self._linear(gate / (1 + np.exp(-gate)) * up, f"layers.{layer}.mlp.down_proj")
        return self._norm(h[1:], "norm") @ self.embedding.T

    def _attend(
        self,
        layer: int,
        context: np.ndarray,
        x: np.ndarray,
        is_causal: bool | None = None,
        window: int | None = None,
    ) -> np.ndarray:
        spec, name, n = self.spec, f"layers.{layer}.self_attn", len(context)
        is_sliding = spec.layer_kinds[layer] == "sliding"
        causal = is_sliding if is_causal is None else is_causal
        window = (window or spec.sliding_window) if is_sliding else None
        key_positions, positions = np.arange(n + len(x)), n + np.arange(len(x))
        both = np.concatenate([context, x])  # the context does not pass through input_layernorm
        q = self._heads(self._linear(x, f"{name}.q_proj"), spec.num_heads, f"{name}.q_norm", positions)
        k = self._heads(
            self._linear(both, f"{name}.k_proj"), spec.num_kv_heads, f"{name}.k_norm", key_positions
        )
        v = self._linear(both, f"{name}.v_proj").reshape(len(both), spec.num_kv_heads, spec.head_dim)
        group = spec.num_heads // spec.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        gap = positions[:, None] - key_positions
        visible = (gap >= 0) if causal else np.full_like(gap, True, dtype=bool)
        if window is not None:
            visible = visible & (gap < window)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return self._linear(y, f"{name}.o_proj")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.spec.rms_norm_eps)
        return x / scale * self.weights[f"{name}.weight"]

    def _heads(self, x: np.ndarray, count: int, norm: str, positions: np.ndarray) -> np.ndarray:
        """[n, count * d] to normed, rotated [n, count, d]: rope over the whole head, halves side by side."""
        d = self.spec.head_dim
        x = self._norm(x.reshape(len(x), count, d), norm)
        angle = positions[:, None] * self.spec.rope_theta ** (-np.arange(d // 2) / (d // 2))
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Contexts:
    """Rows' contexts in the network's own caches, drafted from in one forward; head logits are kept."""

    def __init__(
        self,
        layout: Layout,
        contexts: Sequence[np.ndarray],
        dtype: mx.Dtype = mx.float64,
        parts: DrafterParts | None = None,
    ):
        parts = parts or tiny_drafter(dtype, layout)
        self.seen: list[mx.array] = []

        def head(hidden: mx.array) -> mx.array:
            self.seen.append(parts.shared.logits(hidden))
            return self.seen[-1]

        self.network = parts.network(head)
        self.lengths = mx.array([len(c) for c in contexts], dtype=mx.int32)
        T = max(map(len, contexts))
        x = np.ones((len(contexts), T, HIDDEN))  # ones behind the shorter rows: finite garbage
        for b, context in enumerate(contexts):
            x[b, : len(context)] = context
        empty = parts.caches(len(contexts), 128).arrays
        zero = mx.zeros(len(contexts), dtype=mx.int32)
        self.keys, self.values = self.network.extend(mx.array(x, dtype=dtype), zero, empty.keys, empty.values)

    def draft(self, anchors: Sequence[int], width: int) -> tuple[mx.array, mx.array]:
        """Ids [B, width - 1] and their logits."""
        ids, self.keys, self.values = self.network.draft(
            mx.array(list(anchors), dtype=mx.int32), self.lengths, width, self.keys, self.values
        )
        return ids, self.seen[-1]


def random_context(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, HIDDEN))


# mlx's rope rotates in float32 precision, whatever the dtype.
ROPE_ERROR = 1e-4


@LAYOUTS
@pytest.mark.parametrize("width", [2, 8, 16])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_a_draft_is_the_references(layout: Layout, width: int, length: int) -> None:
    context = random_context(length, length)
    ids, logits = Contexts(layout, [context]).draft([17], width)
    expected = Reference(tiny_drafter(layout=layout)).logits(context, 17, width)
    assert difference(logits[0], expected) < ROPE_ERROR
    assert np.array(ids[0]).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    "wrong",
    [{"is_causal": False}, {"is_causal": True}, {"window": 11}, {"window": 13}],
    ids=["no layer causal", "all layers causal", "window one less", "window one more"],
)
def test_other_masks_would_be_seen(wrong: dict[str, Any]) -> None:
    """The control: sliding layers are causal, full ones are not, and the window counts itself."""
    context = random_context(3, 40)
    _, logits = Contexts("today", [context]).draft([17], 8)
    reference = Reference(tiny_drafter())
    assert difference(logits[0], reference.logits(context, 17, 8)) < ROPE_ERROR
    assert difference(logits[0], reference.logits(context, 17, 8, **wrong)) > 100 * ROPE_ERROR


def test_context_one_position_off_would_be_seen() -> None:
    context = random_context(4, 20)
    _, logits = Contexts("today", [context[1:]]).draft([17], 8)
    assert difference(logits[0], Reference(tiny_drafter()).logits(context, 17, 8)) > 100 * ROPE_ERROR


@LAYOUTS
def test_rows_drafted_together_are_drafted_as_alone(layout: Layout) -> None:
    contexts = [random_context(n, n) for n in (1, 7, 12, 13, 40)]
    anchors = [3, 14, 15, 92, 65]
    ids, logits = Contexts(layout, contexts).draft(anchors, 8)
    for b, context in enumerate(contexts):
        one_id, one = Contexts(layout, [context]).draft([anchors[b]], 8)
        assert difference(logits[b], one[0]) < 1e-9
        assert np.array(ids[b]).tolist() == np.array(one_id[0]).tolist()


@LAYOUTS
def test_a_blocks_own_keys_are_never_kept(layout: Layout) -> None:
    """A wide draft before changes nothing of the next, narrower one."""
    contexts = [random_context(1, 9), random_context(2, 30)]
    used, fresh = Contexts(layout, contexts), Contexts(layout, contexts)
    used.draft([100, 101], 16)
    _, after = used.draft([5, 6], 4)
    _, clean = fresh.draft([5, 6], 4)
    assert (np.array(after) == np.array(clean)).all()


def test_the_anchor_and_every_context_feature_matter() -> None:
    context = random_context(5, 10)
    reference = Reference(tiny_drafter())
    base = reference.logits(context, 17, 8)
    assert difference(base, reference.logits(context, 18, 8)) > 1e-2
    for place in (0, 5, 9):
        other = context.copy()
        other[place] += 1
        _, logits = Contexts("today", [other]).draft([17], 8)
        assert difference(logits[0], base) > 1e-3


# dtype


# What costs: products, attention, caches. Norms and rope are wide inside, by mlx's own choice.
HEAVY = {"Matmul", "Softmax", "ScatterAxis", "Gather", "Concatenate", "Split"}


def heavy_dtypes(function: Any, *arguments: mx.array) -> set[tuple[str, mx.Dtype]]:
    """Floats that a function's heavy operations produce."""
    seen: set[tuple[str, mx.Dtype]] = set()

    def record(entry: dict[str, Any]) -> None:
        if entry["type"] == "primitive" and entry["name"] in HEAVY:
            seen.update((entry["name"], d) for _, _, d in entry["outputs"] if mx.issubdtype(d, mx.floating))

    mx.export_function(record, function, *arguments)
    return seen


@LAYOUTS
def test_no_layer_of_a_bfloat16_drafter_is_promoted(layout: Layout) -> None:
    contexts = Contexts(layout, [random_context(1, 9), random_context(2, 30)], mx.bfloat16)
    _, logits = contexts.draft([5, 6], 8)
    assert {x.dtype for x in (*contexts.keys, *contexts.values, logits)} == {mx.bfloat16}
    network, anchors, lengths = contexts.network, mx.array([5, 6], dtype=mx.int32), contexts.lengths
    x = mx.zeros((2, 4, HIDDEN), dtype=mx.bfloat16)
    layers = len(contexts.keys)

    def run(*caches: mx.array) -> list[mx.array]:
        keys, values = network.extend(x, lengths, list(caches[:layers]), list(caches[layers:]))
        ids, keys, values = network.draft(anchors, lengths + 4, 8, keys, values)
        return [ids, *keys, *values]

    heavy = heavy_dtypes(run, *contexts.keys, *contexts.values)
    assert heavy == {(name, mx.bfloat16) for name in HEAVY}


def test_the_dtype_check_sees_a_promotion() -> None:
    """A float32 scale is enough to run a product wide."""

    def run(x: mx.array) -> mx.array:
        return (x * mx.array(2.0, dtype=mx.float32)) @ x

    assert heavy_dtypes(run, mx.zeros((3, 3), dtype=mx.bfloat16)) == {("Matmul", mx.float32)}


# LocalDrafter: rows by id


def features(names: Sequence[str | None], parts: Sequence[np.ndarray], starts: Sequence[int]) -> FeatureBlock:
    """One block; rows may bring different numbers of features."""
    counts = np.array([len(p) for p in parts], dtype=np.int32)
    x = np.zeros((len(parts), max(1, int(counts.max())), HIDDEN))
    for b, part in enumerate(parts):
        x[b, : len(part)] = part
    ids = tuple(None if n is None else RowId(n) for n in names)
    return FeatureBlock(ids, np.array(starts, dtype=np.int32), counts, mx.array(x, dtype=mx.float64))


def draft_ids(
    window: WindowId, block: FeatureBlock, anchors: Sequence[int], width: int = 8
) -> list[list[int]]:
    drafts = tiny_lane().drafter.draft(window, block, mx.array(list(anchors), dtype=mx.int32), width).wait()
    assert drafts.has_taken
    return np.array(drafts.ids).tolist()


@pytest.fixture
def window_id() -> Iterator[WindowId]:
    name = WindowId("drafter rows")
    yield name
    tiny_lane().drafter.close(name)
    assert local(tiny_lane()).num_sessions == 0


def expected_ids(context: np.ndarray, anchor: int, width: int = 8) -> list[int]:
    return Reference(tiny_drafter()).logits(context, anchor, width).argmax(-1).tolist()


NONE = np.zeros((0, HIDDEN))


def test_prompts_read_in_chunks_and_mixed_company_draft_as_the_reference(window_id: WindowId) -> None:
    drafter, a, b, c = tiny_lane().drafter, random_context(1, 37), random_context(2, 5), random_context(3, 18)
    drafter.extend(window_id, features(["a", "b"], [a[:16], b], [0, 0]))
    drafter.extend(window_id, features(["a", None], [a[16:32], NONE], [16, 0]))
    drafter.extend(window_id, features(["a", "c"], [a[32:], c[:9]], [32, 0]))
    assert local(tiny_lane()).context_lengths(window_id) == {"a": 37, "b": 5, "c": 9}
    ids = draft_ids(window_id, features(["b", None, "a", None], [NONE] * 4, [5, 0, 37, 0]), [7, 0, 8, 0])
    assert ids[0] == expected_ids(b, 7)
    assert ids[2] == expected_ids(a, 8)
    drafter.extend(window_id, features([None, "c"], [NONE, c[9:]], [0, 9]))
    more = random_context(4, 6)
    ids = draft_ids(
        window_id, features(["b", "c", "a", None], [more, NONE, NONE, NONE], [5, 18, 37, 0]), [7, 8, 9, 0]
    )
    assert ids[:3] == [expected_ids(np.concatenate([b, more]), 7), expected_ids(c, 8), expected_ids(a, 9)]
    assert local(tiny_lane()).context_lengths(window_id) == {"a": 37, "b": 11, "c": 18}


def test_slots_may_move_shrink_and_grow_between_calls(window_id: WindowId) -> None:
    contexts = {name: random_context(i, 4 + 9 * i) for i, name in enumerate("abcd")}
    tiny_lane().drafter.extend(window_id, features(list("abcd"), list(contexts.values()), [0] * 4))
    for order in (("a", "b", "c", "d"), ("d", "b"), ("b",), ("b", None), ("b", None, None, None)):
        gone = tuple(RowId(n) for n in "abcd" if n not in order)
        tiny_lane().drafter.drop(window_id, gone)
        starts = [0 if n is None else len(contexts[n]) for n in order]
        ids = draft_ids(window_id, features(order, [NONE] * len(order), starts), [9] * len(order))
        for name, drafted in zip(order, ids, strict=True):
            if name is not None:
                assert drafted == expected_ids(contexts[name], 9)


@pytest.mark.parametrize("start", [4, 6, 0])
def test_features_that_do_not_continue_a_context_are_refused(window_id: WindowId, start: int) -> None:
    drafter, a = tiny_lane().drafter, random_context(1, 5)
    drafter.extend(window_id, features(["a"], [a], [0]))
    with pytest.raises(WindowLost, match="context has 5 tokens"):
        draft_ids(window_id, features(["a"], [a[:1]], [start]), [7])
    if start:
        with pytest.raises(WindowLost, match="context has 5 tokens"):
            drafter.extend(window_id, features(["a"], [a[:1]], [start]))
    # Nothing was taken: the row goes on where it was.
    assert draft_ids(window_id, features(["a"], [NONE], [5]), [7]) == [expected_ids(a, 7)]


def test_a_row_that_nobody_staged_is_lost(window_id: WindowId) -> None:
    with pytest.raises(WindowLost):
        draft_ids(window_id, features(["unknown"], [NONE], [5]), [7])


def test_a_context_made_again_from_its_start_drafts_the_same(window_id: WindowId) -> None:
    drafter, a, b = tiny_lane().drafter, random_context(1, 21), random_context(2, 5)
    drafter.extend(window_id, features(["a", "b"], [a, b], [0, 0]))
    block = features(["a", "b"], [NONE, NONE], [21, 5])
    before = draft_ids(window_id, block, [7, 8])
    drafter.extend(window_id, features(["a"], [a], [0]))  # both rows are live: only a's is made again
    assert draft_ids(window_id, block, [7, 8]) == before
    drafter.close(window_id)
    with pytest.raises(WindowLost):
        draft_ids(window_id, block, [7, 8])
    drafter.extend(window_id, features(["b", "a"], [b, a], [0, 0]))
    assert draft_ids(window_id, block, [7, 8]) == before


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_target_and_drafter_agree_on_the_dtype_of_features(dtype: mx.Dtype) -> None:
    lane = tiny_lane(dtype)
    assert lane.drafter.feature_dtype == lane.target.feature_dtype == dtype


def test_a_dropped_rows_name_can_be_used_again(window_id: WindowId) -> None:
    drafter, old, new = tiny_lane().drafter, random_context(1, 30), random_context(2, 4)
    drafter.extend(window_id, features(["a"], [old], [0]))
    draft_ids(window_id, features(["a"], [NONE], [30]), [7])
    drafter.drop(window_id, (RowId("a"),))
    drafter.extend(window_id, features(["a"], [new], [0]))
    assert draft_ids(window_id, features(["a"], [NONE], [4]), [7]) == [expected_ids(new, 7)]


# In a window


@pytest.mark.parametrize(
    "widths", [(8,), (1,), (8, 1, 1, 4), (1,) * 40 + (8,)], ids=["drafted", "classic", "mixed", "long wait"]
)
def test_context_and_waiting_features_are_the_target_length_after_every_step(widths: tuple[int, ...]) -> None:
    """Through joins, refills, leaves and shrinks; the first draft after classic rounds is the reference's."""
    lane = tiny_lane()
    requests = [
        row(f"r{i}", prompt(i, n), budget)
        for i, (n, budget) in enumerate([(1, 50), (20, 9), (70, 14), (5, 30), (33, 5)])
    ]
    drafter = scripted(lane, requests, lambda _row, length: length % 3)
    with opened(
        lane, *requests[:3], width=ListedWidths(widths), drafter=drafter, max_rows=3, prefill_chunk=32
    ) as window:
        reports = []
        while window.has_work:
            if len(reports) == 4:
                for request in requests[3:]:
                    window.admit(request)
            reports.append(window.step())
            lengths = local(lane).context_lengths(WINDOW)
            block = window.plan().features
            for slot, live in enumerate(window.rows):
                if live is None:
                    assert block.counts[slot] == 0
                    continue
                assert lengths[live.row_id] == block.starts[slot]
                assert block.starts[slot] + block.counts[slot] == window.caches.lengths[slot]
        assert not local(lane).context_lengths(WINDOW)
    assert tokens_of(reports) == {r.row_id: alone(lane, r) for r in requests}


def test_a_windows_drafts_are_those_of_the_whole_context_read_anew() -> None:
    """First and later rounds: the whole prompt counts, and classic rounds lose no feature."""
    lane = tiny_lane()
    requests = [row("a", prompt(1, 45), 40), row("b", prompt(2, 3), 40)]
    drafter = scripted(lane, requests, 2)
    reference, projection = Reference(tiny_drafter()), tiny_drafter().projection()
    with opened(lane, *requests, width=ListedWidths((8, 1, 1, 4, 16)), drafter=drafter) as window:
        for _ in range(7):
            window.step()
    compared = 0
    for (block, width), own in zip(drafter.calls, drafter.own, strict=True):
        for slot, request in enumerate(requests):
            if width == 1:
                continue
            assert block.row_ids[slot] == request.row_id
            said = (*request.tokens, *alone(lane, request))
            length = int(block.starts[slot] + block.counts[slot])
            context = np.array(projection(tapped(said[:length])))[0]
            assert own[slot].tolist() == reference.logits(context, said[length], width).argmax(-1).tolist()
            compared += 1
    assert compared >= 8


def tapped(tokens: Sequence[int]) -> mx.array:
    """Raw features [1, T, F] of a row read in one piece."""
    target = tiny_lane().target
    caches = target.new_caches(1, 256).arrays
    zero, count = mx.array([0], dtype=mx.int32), mx.array([len(tokens)], dtype=mx.int32)
    return target.network.prefill(mx.array([tokens], dtype=mx.int32), zero, count, caches)[1]


# Flavours that no released drafter of ours has, but that the loader lets in


class Stretched(Reference):
    """Rope stretched by YaRN as its paper and transformers have it."""

    def _heads(self, x: np.ndarray, count: int, norm: str, positions: np.ndarray) -> np.ndarray:
        d, scaling, base = self.spec.head_dim, self.spec.rope_scaling, self.spec.rope_theta
        assert scaling is not None
        assert scaling.original_max_positions is not None
        x = self._norm(x.reshape(len(x), count, d), norm)

        length = scaling.original_max_positions

        def dimension(turns: float) -> float:
            return d * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base))

        low, high = max(np.floor(dimension(32)), 0), min(np.ceil(dimension(1)), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        fast = base ** (-np.arange(d // 2) / (d // 2))
        angle = positions[:, None] * (fast / scaling.factor * ramp + fast * (1 - ramp))
        gain = 0.1 * np.log(scaling.factor) + 1
        cos, sin = gain * np.cos(angle)[:, None], gain * np.sin(angle)[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def flavoured(change: Callable[[dict[str, Any]], object]) -> DrafterParts:
    """The tiny drafter of today's layout under another config; same weights."""
    with tempfile.TemporaryDirectory() as folder:
        path, drafter = write_pair(Path(folder), "today")
        spec = read_drafter_spec(edit_config(drafter, change), read_target_spec(path))
        parts = tiny_drafter()
        return DrafterParts(spec, parts.weights, parts.shared)


def _stretch(config: dict[str, Any]) -> None:
    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config["rope_parameters"] = {**stretch, "rope_theta": 10000.0}


def test_a_drafter_with_yarn_rope_drafts_as_the_reference() -> None:
    parts, context = flavoured(_stretch), random_context(3, 40)
    _, logits = Contexts("today", [context], parts=parts).draft([17], 8)
    assert difference(logits[0], Stretched(parts).logits(context, 17, 8)) < ROPE_ERROR
    assert difference(logits[0], Reference(parts).logits(context, 17, 8)) > 100 * ROPE_ERROR  # the control


def test_rows_at_other_positions_are_stretched_as_alone() -> None:
    parts, contexts = flavoured(_stretch), [random_context(n, n) for n in (1, 12, 40)]
    _, logits = Contexts("today", contexts, parts=parts).draft([3, 14, 15], 8)
    for b, context in enumerate(contexts):
        assert difference(logits[b], Stretched(parts).logits(context, [3, 14, 15][b], 8)) < ROPE_ERROR


def test_a_softcap_bounds_the_logits_and_keeps_the_drafts() -> None:
    context = random_context(3, 40)
    capped = flavoured(lambda config: config.update(final_logit_softcapping=2.0))
    ids, logits = Contexts("today", [context], parts=capped).draft([17], 8)
    plain_ids, plain = Contexts("today", [context]).draft([17], 8)
    assert difference(logits[0], plain[0]) == 0  # the head is before the cap
    assert np.array(ids).tolist() == np.array(plain_ids).tolist()  # the cap is monotonous
    assert capped.spec.final_logit_softcap == 2.0


def test_an_embedding_scale_multiplies_the_block_and_not_the_context() -> None:
    parts = flavoured(lambda config: config.update(input_embedding_scale=3.0))
    context = random_context(3, 40)
    _, logits = Contexts("today", [context], parts=parts).draft([17], 8)
    reference = Reference(parts)
    reference.scale = 3.0
    assert difference(logits[0], reference.logits(context, 17, 8)) < ROPE_ERROR
    reference.scale = 1.0
    assert difference(logits[0], reference.logits(context, 17, 8)) > 100 * ROPE_ERROR  # the control
