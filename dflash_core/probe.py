"""The probe at start: is a block of many rows, bit for bit, one row that takes one token at a time?

Kernels round differently by shape. For each (slots, width) that rounds may use, a block is run from known
states and held against its rows alone, one token at a time: the logits of every position, and what a
commit of all or half of it leaves in the caches. Prompts lie on both sides of 128 tokens: some kernels
change there. The forward is compiled as the loop's own is, without taps and choice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_core.models.target import CacheArrays
from dflash_core.parity import DEFAULT_MARGIN, Verdict
from dflash_core.row_cache import RowCaches, row_buckets
from dflash_core.sampling import pack
from dflash_core.shapes import Shape
from dflash_core.target import Target
from dflash_core.width import widths_up_to

PROMPT_TOKENS = (12, 150)
_NOT_FINITE = float(np.finfo(np.float32).max)  # as a gap; JSON knows no infinity
_VERDICTS: tuple[Verdict, ...] = ("equal", "near_tie", "different")


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one shape.

    ``gap``: two tokens whose logits, alone, lie further apart than this keep their order in the block.
    ``near_tie``: a gap under the margin; ``equal``: no bit differs, in logits or caches.
    """

    verdict: Verdict
    gap: float = 0.0  # logits


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of the shapes that were probed; of the others nothing is known."""

    table: dict[Shape, Finding] = field(default_factory=dict[Shape, Finding])

    @property
    def equal(self) -> frozenset[Shape]:
        """The shapes that change no bit."""
        return frozenset(shape for shape, finding in self.table.items() if finding.verdict == "equal")

    def as_json(self) -> dict[str, dict[str, Any]]:
        """The table with ``"slots x width"`` keys."""
        return {
            f"{slots}x{width}": {"verdict": finding.verdict, "gap": finding.gap}
            for (slots, width), finding in sorted(self.table.items())
        }

    @staticmethod
    def from_json(data: dict[str, dict[str, Any]]) -> "Findings":
        """Read what ``as_json`` wrote. Raises ValueError, KeyError or TypeError if it is something else."""
        table: dict[Shape, Finding] = {}
        for key, entry in data.items():
            slots, width = key.split("x")
            if entry["verdict"] not in _VERDICTS:
                raise ValueError(f"no verdict: {entry['verdict']}")
            table[int(slots), int(width)] = Finding(entry["verdict"], float(entry["gap"]))
        return Findings(table)


def shapes_to_probe(max_rows: int, widest: int) -> list[Shape]:
    """Every (row bucket, width) that rounds may use: small shapes first, they are the likeliest equal."""
    return sorted(
        ((b, w) for b in row_buckets(max_rows) for w in widths_up_to(widest)),
        key=lambda shape: (shape[0] * shape[1], shape),
    )


def probe(
    target: Target,
    shapes: Sequence[Shape],
    *,
    budget_s: float,
    margin: float = DEFAULT_MARGIN,
    known: Findings | None = None,
) -> Findings:
    """Try each shape that is not ``known`` yet, in order; none is begun after ``budget_s`` seconds.

    On the MLX thread. The reference's own time (the widest block, token by token) comes on top.
    """
    table = dict(known.table) if known is not None else {}
    missing = [shape for shape in shapes if shape not in table]
    if not missing or budget_s <= 0:
        return Findings(table)
    bench = _Bench(target, max(width for _, width in missing))
    began = time.perf_counter()
    for shape in missing:
        if time.perf_counter() - began > budget_s:
            break
        table[shape] = bench.judge(*shape, margin)
    return Findings(table)


class _Bench:
    """Two rows read alone, their next tokens one by one, and blocks held against them."""

    def __init__(self, target: Target, num_tokens: int):
        self._target = target
        self._run: Callable[..., Any] = mx.compile(self._forward)
        self._starts = [self._read_prompt(row) for row in range(len(PROMPT_TOKENS))]
        tokens: list[list[int]] = []
        logits: list[mx.array] = []
        marks: list[mx.array] = []
        for start, first in self._starts:
            said, seen, left = self._walk(start, first, num_tokens)
            tokens.append(said)
            logits.append(seen)
            marks.append(left)
        self._tokens = np.array(tokens, dtype=np.int32)  # [R, n] inputs, the anchor first
        self._logits = mx.stack(logits)  # [R, n, V]
        self._marks = mx.stack(marks)  # [R, n] of the caches after each token

    def judge(self, slots: int, width: int, margin: float) -> Finding:
        """Hold a block of this shape against its rows alone."""
        half = max(1, width // 2)
        # (row, inputs kept): either row kept whole and in half, in any slots from 4 on.
        plan = [(0, width), (1, half), (0, half), (1, width)]
        if slots == 1:
            return max((self._try([slot], width, margin) for slot in plan), key=_severity)
        return self._try([plan[i % len(plan)] for i in range(slots)], width, margin)

    def _try(self, plan: Sequence[tuple[int, int]], width: int, margin: float) -> Finding:
        rows = [row for row, _ in plan]
        kept = np.array([count for _, count in plan], dtype=np.int32)
        lengths, arrays = self._caches_of(rows)
        tokens = self._tokens[rows, :width]
        logits, after = self._play(tokens, lengths, kept, arrays)
        index = mx.array(rows)
        alone = self._logits[index, :width]
        delta = logits - alone
        spread = mx.max(mx.max(delta, axis=-1) - mx.min(delta, axis=-1))
        gap, is_equal = np.array(mx.stack([spread, mx.all(logits == alone).astype(spread.dtype)])).tolist()
        if is_equal and self._left_equal(after, rows, lengths, kept):
            return Finding("equal")
        if not np.isfinite(gap):
            return Finding("different", _NOT_FINITE)
        return Finding("near_tie" if gap < margin else "different", gap)

    def _left_equal(
        self, after: CacheArrays, rows: Sequence[int], lengths: np.ndarray, kept: np.ndarray
    ) -> bool:
        """Whether the caches are those of the rows alone after as many tokens."""
        alone = self._marks[mx.array(list(rows)), mx.array(kept - 1)]
        return bool(np.array(mx.all(mark(after, mx.array(lengths), mx.array(kept)) == alone)))

    def _read_prompt(self, row: int) -> tuple[RowCaches, int]:
        """A row's caches after its prompt, read alone, and the target's own token after it."""
        target = self._target
        prompt = np.random.default_rng(row).integers(0, target.vocab_size, PROMPT_TOKENS[row])
        caches = target.new_caches(1, 1)
        counts = np.array([len(prompt)], dtype=np.int32)
        greedy = pack([None], target.vocab_size)
        outcome = target.prefill(caches, prompt[None].astype(np.int32), counts, greedy).read()
        return caches, int(outcome.chosen[0, 0])

    def _walk(self, start: RowCaches, first: int, num_tokens: int) -> tuple[list[int], mx.array, mx.array]:
        """One token at a time: inputs, logits [n, V] and the caches' marks [n]."""
        arrays, length = _copy(start), int(start.lengths[0])
        tokens, seen = [first], list[mx.array]()
        left: list[mx.array] = []
        origin = mx.array(start.lengths)
        for step in range(num_tokens):
            at = np.array([length + step], dtype=np.int32)
            one = np.array([1], dtype=np.int32)
            logits, arrays = self._play(np.array([[tokens[-1]]], dtype=np.int32), at, one, arrays)
            seen.append(logits[0, 0])
            left.append(mark(arrays, origin, mx.array([step + 1]))[0])
            mx.eval(seen[-1], left[-1])
            tokens.append(int(np.array(mx.argmax(seen[-1]))))
        return tokens[:-1], mx.stack(seen), mx.stack(left)

    def _caches_of(self, rows: Sequence[int]) -> tuple[np.ndarray, CacheArrays]:
        """Caches whose slots hold copies of the rows; alone, a row has its own capacity."""
        widest = max(self._starts[row][0].capacity for row in rows)
        room = self._target.new_caches(len(rows), widest)
        for slot, row in enumerate(rows):
            room.copy_row(slot, self._starts[row][0], 0)
        room.reserve(self._tokens.shape[1])
        return room.lengths, room.take()

    def _play(
        self, tokens: np.ndarray, lengths: np.ndarray, kept: np.ndarray, arrays: CacheArrays
    ) -> tuple[mx.array, CacheArrays]:
        """Logits [B, K, V] in float32 (float64 stays) and the caches after ``kept`` inputs."""
        logits, *rest = self._run(
            mx.array(tokens),
            mx.array(lengths),
            mx.array(kept),
            arrays.keys,
            arrays.values,
            arrays.states,
            arrays.conv,
        )
        return logits, CacheArrays(*rest)

    def _forward(
        self,
        tokens: mx.array,
        lengths: mx.array,
        counts: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        states: mx.array,
        conv: mx.array,
    ) -> tuple[Any, ...]:
        network = self._target.network
        hidden, _, caches, journal = network.verify(tokens, lengths, CacheArrays(keys, values, states, conv))
        caches = network.commit(journal, caches, counts)
        logits = network.logits(hidden)
        wide = logits if logits.dtype == mx.float64 else logits.astype(mx.float32)
        return wide, caches.keys, caches.values, caches.states, caches.conv


def mark(arrays: CacheArrays, lengths: mx.array, counts: mx.array) -> mx.array:
    """A number per row [B] that changes with any bit that ``counts`` tokens after ``lengths`` left behind.

    Recurrent states and convolution windows as they stand, keys and values of those tokens; not what
    lies beyond, whatever the capacity.
    """
    total = mx.zeros(lengths.shape, dtype=mx.uint32)
    for x in (*arrays.keys, *arrays.values):  # [B, H, S, D]
        place = mx.arange(x.shape[2]) - lengths[:, None]  # [B, S]
        is_new = (place >= 0) & (place < counts[:, None])
        weighted = _weighted(x.swapaxes(1, 2).flatten(2))  # [B, S]
        total = total * 31 + mx.sum(mx.where(is_new, weighted * _odd(place), 0), axis=1)
    for x in (arrays.states, arrays.conv):
        if x.size > 0:
            total = total * 31 + _weighted(x.swapaxes(0, 1).flatten(1))
    return total


def _weighted(x: mx.array) -> mx.array:
    """The bits of [..., N], each with a weight of its place, summed over the last axis; wraps."""
    bits = x.view(mx.uint16).astype(mx.uint32) if x.itemsize == 2 else x.view(mx.uint32)
    return mx.sum(bits * _odd(mx.arange(bits.shape[-1])), axis=-1)


def _odd(index: mx.array) -> mx.array:
    """Odd numbers, far apart for neighbours."""
    return (index.astype(mx.uint32) * 2654435761) | 1


def _copy(caches: RowCaches) -> CacheArrays:
    """The same contents; nobody writes into the original."""
    twin = caches.arrays
    return CacheArrays(list(twin.keys), list(twin.values), twin.states, twin.conv)


def _severity(finding: Finding) -> tuple[int, float]:
    return _VERDICTS.index(finding.verdict), finding.gap
