"""Which files hold a checkpoint's weights: one file, or shards with or without an index."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dflash_core.checkpoints.fields import Fields
from dflash_core.checkpoints.json_file import read_json_object
from dflash_core.checkpoints.safetensors_header import SafetensorsHeader, TensorEntry, read_header
from dflash_core.errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
_PATTERN = "model*.safetensors"  # what mlx-lm loads
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A checkpoint's weight files, headers read and checked, no data read."""

    folder: Path
    headers: tuple[SafetensorsHeader, ...]
    tensors: dict[str, TensorEntry]


def read_weight_files(folder: Path) -> WeightFiles:
    """Find the weight files of a checkpoint and read their headers.

    Raises:
        CheckpointError: no folder, no safetensors (pickles are refused by name), a missing or stray shard,
            an index that leads elsewhere, a tensor in two files, or what ``read_header`` raises.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; expected a checkpoint directory")
    present = sorted(folder.glob(_PATTERN))
    index = _read_index(folder / INDEX) if (folder / INDEX).exists() else None
    if index is not None:
        _check_index_files(folder, set(index.values()), present)
    elif not present:
        raise _no_weights(folder)
    else:
        _check_complete(folder, {path.name for path in present})
    headers = tuple(read_header(path) for path in present)
    tensors = _merge(headers)
    for name, file in (index or {}).items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f'{folder / INDEX}: tensor "{name}" is not in {file}, where it is expected')
    return WeightFiles(folder, headers, tensors)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = Fields(read_json_object(path), str(path)).section("weight_map")
    files: dict[str, str] = {}
    for name in weight_map:
        file = weight_map.text(name)
        if file is None or not _is_plain_name(file):
            raise weight_map.error(name, "the plain name of a .safetensors file in the same directory")
        files[name] = file
    return files


def _is_plain_name(file: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors", file))


def _check_index_files(folder: Path, listed: set[str], present: Iterable[Path]) -> None:
    names = {path.name for path in present}
    missing, stray = sorted(listed - names), sorted(names - listed)
    if missing:
        hint = "" if missing[0].startswith("model") else " named model*.safetensors"
        raise CheckpointError(f"{folder / missing[0]}: no such shard{hint}; {INDEX} expects it")
    if stray:
        # mlx-lm loads every model*.safetensors, so that a left-over shard would win silently.
        raise CheckpointError(f"{folder / stray[0]}: {INDEX} does not list it; expected only listed shards")


def _check_complete(folder: Path, names: set[str]) -> None:
    """Without an index the shards' own names still say how many there must be."""
    for name in sorted(names):
        if match := _SHARD.match(name):
            digits, count = len(match["number"]), match["count"]
            for number in range(1, min(int(count), 10_000) + 1):
                shard = f"{match['stem']}-{number:0{digits}d}-of-{count}.safetensors"
                if shard not in names:
                    raise CheckpointError(f"{folder / shard}: no such shard; {name} expects it beside itself")


def _no_weights(folder: Path) -> CheckpointError:
    for pattern in _PICKLES:
        if found := sorted(folder.glob(pattern)):
            return CheckpointError(f"{found[0]}: a pickle checkpoint is never loaded; expected {_PATTERN}")
    return CheckpointError(f"{folder}: no weights; expected {_PATTERN}")


def _merge(headers: Iterable[SafetensorsHeader]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f'{header.path}: tensor "{name}" is also in {tensors[name].file.name}; expected it once'
                )
            tensors[name] = entry
    return tensors
