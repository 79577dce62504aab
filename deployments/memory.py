"""Whether a pair and its rows fit a machine, as a sum that can be shown.

Weights are counted as they are loaded: float32 on the CPU, packed ones as they lie on disk unless they are
unpacked. Rows are counted at a length in tokens, since their caches grow with it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.memory_limit import Limit, find_limit, find_wired, gib, wired_advice
from dflash_core.checkpoints import read_drafter_spec
from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.packing import stays_packed, unpacked_bytes
from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.checkpoints.target_config import read_target_files
from dflash_core.checkpoints.target_tensors import EMBEDDING, HEAD, text_tensors
from dflash_core.checkpoints.weight_files import read_weight_files
from dflash_core.errors import CheckpointError

if TYPE_CHECKING:
    from dflash_core.row_cache import CacheShape

LEAST_TOKENS = 1024  # a row shorter than this is of no use
PREFILL_ROWS = 4  # prompts that are read beside the window
PREFIX_SHARE = 0.05  # of memory, for saved prefixes unless the settings say how much
MOST_PREFIX_BYTES = 2 * 2**30  # unless they do
Roles = frozenset[str]
TARGET, DRAFTER = "Target", "Drafter"  # as the deployments are called
BOTH: Roles = frozenset({TARGET, DRAFTER})
_PACKED = {"U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}


@dataclass(frozen=True, slots=True)
class Part:
    """One summand."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What must be in memory at once. Activations and the allocator's own come on top."""

    parts: tuple[Part, ...]
    tokens: int  # the length that rows are counted at

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    def explain(self) -> str:
        """Write the sum, a line for each part."""
        width = max(len(part.name) for part in self.parts)
        lines = [f"{part.name:<{width}}  {gib(part.bytes)}" for part in self.parts]
        return "\n".join([*lines, f"{'sum':<{width}}  {gib(self.total)}"])

    def in_one_line(self) -> str:
        """Write the sum for a message."""
        parts = " + ".join(f"{part.name} {gib(part.bytes).strip()}" for part in self.parts)
        return f"{parts} = {gib(self.total).strip()}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Sizes of a target and its drafter in memory; ``read_pair`` makes it."""

    target_bytes: int
    target_row: "CacheShape"
    drafter_bytes: int  # 0: no drafter
    borrowed_bytes: int  # the drafter's own copy of the target's embedding and head
    drafter_row: "CacheShape | None"
    max_context: int
    rows: int
    prefix_bytes: int = 0  # for saved prefixes

    def need(self, tokens: int, roles: Roles = BOTH) -> Need:
        """Sum up what a process, or a machine with both, holds while every row is ``tokens`` long."""
        parts: list[Part] = []
        if TARGET in roles:
            rows = self.rows + min(PREFILL_ROWS, self.rows)
            parts.append(Part("target weights", self.target_bytes))
            parts.append(_row_part("target rows", self.target_row, rows, tokens))
            if self.prefix_bytes:
                parts.append(Part("saved prefixes", self.prefix_bytes))
        if DRAFTER in roles and self.drafter_row is not None:
            parts.append(Part("drafter weights", self.drafter_bytes))
            parts.append(Part("its copy of embedding and head", self.borrowed_bytes))
            parts.append(_row_part("drafter rows", self.drafter_row, self.rows, tokens))
        return Need(tuple(parts), tokens)

    def longest(self, limit: int, roles: Roles = BOTH) -> int:
        """Most tokens for every row at once within ``limit`` bytes; 0 if not even the weights fit."""
        return _largest(self.max_context, lambda tokens: self.need(tokens, roles).total <= limit)

    def most_rows(self, tokens: int, limit: int, roles: Roles = BOTH) -> int:
        """Most rows of ``tokens`` each within ``limit`` bytes; 0 if not even one."""
        return _largest(self.rows, lambda rows: replace(self, rows=rows).need(tokens, roles).total <= limit)


def read_pair(target: Path, drafter: Path | None, *, rows: int, max_context: int | None = None) -> Pair:
    """Read sizes off configs and headers; no weights are loaded. Imports MLX.

    Raises CheckpointError.
    """
    from dflash_core.checkpoints.dtypes import activation_dtype
    from dflash_core.loading import drafter_cache_shape, target_cache_shape

    spec, files = read_target_files(target)
    dtype = activation_dtype(spec.dtype, None, is_quantized=spec.quantization is not None)
    tensors = text_tensors(files.tensors)
    packed = stays_packed(spec, tensors)  # asked once: what is free changes
    shared = {n: entry for n, entry in tensors.items() if n.startswith((f"{EMBEDDING}.", f"{HEAD}."))}
    target_bytes, shared_bytes = (
        _bytes(part, dtype.size) if packed else unpacked_bytes(spec, part) for part in (tensors, shared)
    )
    drafter_bytes = borrowed_bytes = 0
    drafter_row = None
    if drafter is not None:
        drafter_row = drafter_cache_shape(read_drafter_spec(drafter, spec), dtype)
        drafter_bytes = _bytes(read_weight_files(drafter).tensors, dtype.size)
        borrowed_bytes = shared_bytes
    return Pair(
        target_bytes=target_bytes,
        target_row=target_cache_shape(spec, dtype),
        drafter_bytes=drafter_bytes,
        borrowed_bytes=borrowed_bytes,
        drafter_row=drafter_row,
        max_context=min(max_context or spec.max_context, spec.max_context),
        rows=rows,
    )


def with_prefixes(pair: Pair, wanted: int | None, limit: Limit) -> Pair:
    """The pair with room for saved prefixes; where none was asked for, what is left at the most."""
    if wanted is None:
        left = limit.bytes - pair.need(min(LEAST_TOKENS, pair.max_context)).total
        wanted = max(0, min(int(PREFIX_SHARE * limit.bytes), MOST_PREFIX_BYTES, left))
    return replace(pair, prefix_bytes=wanted)


def require_room(pair: Pair, limit: Limit | None = None, roles: Roles = BOTH) -> None:
    """Refuse, with the sum, to load what cannot run here: weights and the shortest rows of any use.

    Raises CheckpointError in one line. ``limit`` None asks the device.
    """
    limit = limit or find_limit()
    tokens = min(LEAST_TOKENS, pair.max_context)
    need = pair.need(tokens, roles)
    if need.total <= limit.bytes:
        return
    one = replace(pair, rows=1).need(tokens, roles)
    advice = "fewer max_rows" if one.total <= limit.bytes else "a smaller or a 4-bit target"
    if TARGET in roles and need.total - pair.prefix_bytes <= limit.bytes:
        advice = "less prefix_bytes"
    room = f"{gib(limit.bytes).strip()} ({limit.source})"
    more = wired_advice(need.total, limit)
    raise CheckpointError(
        f"not enough memory here: {need.in_one_line()}, {room}; take {advice}, or more memory{more}"
    )


def require_shared_room(pair: Pair) -> None:
    """Refuse what only one machine can hold, if it cannot hold both. Raises as ``require_room``.

    Target and drafter load at the same time, and each finds the room that the other one is about to take.
    On a GPU of its own that shows at the first allocation; Metal's limit is each process' own.
    """
    if (wired := find_wired()) is not None:
        require_room(pair, wired)


def _row_part(name: str, shape: "CacheShape", rows: int, tokens: int) -> Part:
    from dflash_core.row_cache import bucket_capacity

    words = f"{name}: {rows} of {tokens} tokens"
    return Part(words, rows * shape.bytes_per_row(bucket_capacity(tokens)))


def _bytes(tensors: Mapping[str, TensorEntry], float_bytes: int) -> int:
    """Bytes in memory: floats in the dtype that runs here, packed words as stored."""
    return sum(
        (float_bytes if entry.dtype in FLOATS else _PACKED.get(entry.dtype, 1)) * math.prod(entry.shape)
        for entry in tensors.values()
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that fits, by bisection; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
