"""The header of a safetensors file: names, shapes and sizes, checked against the file without reading data.

Format: eight bytes little-endian header length, the header (JSON: name to dtype, shape and data offsets),
then the data, without holes.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dflash_core.checkpoints.fields import is_integer, show
from dflash_core.checkpoints.json_file import parse_json_object, require_plain_file
from dflash_core.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_MAX_AXES = 8
_MAX_LENGTH = 2**31 - 1  # of an axis: what MLX counts with
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it looks like. ``dtype`` is the format's word: BF16, F32, U32, ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file says about itself. ``digest`` is the hash of the header's bytes."""

    path: Path
    data_start: int
    size: int
    digest: str
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of one file.

    Raises:
        CheckpointError: missing, no plain file, truncated, a Git LFS pointer, a malformed header, or data
            that does not add up to the file's size.
    """
    try:
        size = require_plain_file(path)
        with path.open("rb") as file:
            prefix = file.read(len(_LFS_POINTER))
            length = _header_length(path, prefix, size)
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; expected a safetensors file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    header = parse_json_object(raw, f"{path} (header)")
    header.pop("__metadata__", None)
    spans = [_parse_entry(path, name, value) for name, value in header.items()]
    _check_spans(path, [span for _, span in spans], size - 8 - length)
    tensors = {name: entry for name, (entry, _) in zip(header, spans, strict=True)}
    return SafetensorsHeader(path, 8 + length, size, hashlib.sha256(raw).hexdigest(), tensors)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if prefix == _LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer; expected the file itself (git lfs pull)")
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or (8 + length > size and length <= MAX_HEADER_BYTES):
        raise CheckpointError(f"{path}: truncated inside its header at {size} bytes; expected more")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes; expected a safetensors file")
    return length


def _parse_entry(path: Path, name: str, value: object) -> tuple[TensorEntry, tuple[int, int]]:
    """Return a tensor's entry and its span of bytes in the data."""
    fields = cast(dict[str, object], value if isinstance(value, dict) else {})
    dtype = fields.get("dtype")
    shape = _naturals(fields.get("shape"))
    span = _naturals(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or span is None or len(span) != 2:
        raise CheckpointError(
            f'{path}: header entry "{name}" is {show(fields or None)}; expected dtype, shape and data_offsets'
        )
    # Before anything is multiplied or printed: a list of a million numbers is a shape too.
    if len(shape) > _MAX_AXES or max(shape, default=0) > _MAX_LENGTH:
        raise CheckpointError(
            f'{path}: tensor "{name}" has shape {show(list(shape))}; expected at most {_MAX_AXES} axes '
            f"of at most {_MAX_LENGTH}"
        )
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f'{path}: tensor "{name}" has dtype {show(dtype)}; expected a known dtype')
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if span[1] - span[0] != num_bytes:
        raise CheckpointError(
            f'{path}: tensor "{name}" has {span[1] - span[0]} bytes; expected {num_bytes} for {dtype} {shape}'
        )
    return TensorEntry(path, dtype, shape), (span[0], span[1])


def _naturals(value: object) -> tuple[int, ...] | None:
    items = cast(list[object], value) if isinstance(value, list) else [None]
    numbers = tuple(item for item in items if is_integer(item) and item >= 0)
    return numbers if len(numbers) == len(items) else None


def _check_spans(path: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise CheckpointError(f"{path}: data at byte {begin}; expected the next tensor at {end}")
        end = stop
    if end > data_bytes:
        raise CheckpointError(f"{path}: truncated: {data_bytes} bytes of data; expected {end}")
    if end < data_bytes:
        raise CheckpointError(f"{path}: {data_bytes} bytes of data; its header describes only {end}")
