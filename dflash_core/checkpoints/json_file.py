"""Strict JSON: one object per file, no duplicate key, every number finite and of sane length."""

import json
import math
from pathlib import Path
from typing import cast

from dflash_core.errors import CheckpointError

CONFIG = "config.json"
MAX_JSON_BYTES = 32 * 2**20
_MAX_INT_DIGITS = 20  # what no key of a checkpoint needs; Python itself refuses to parse 4300


def read_json_object(path: Path) -> dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        CheckpointError: no such file, unreadable, larger than 32 MiB, malformed, not an object, a key
            given twice, or a number that is not finite.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes; expected a small JSON file")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; expected a checkpoint's {path.name}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json_object(data, str(path))


def read_config(path: Path) -> dict[str, object]:
    """Read ``config.json`` of a checkpoint directory; raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected a checkpoint directory")
    return read_json_object(path / CONFIG)


def parse_json_object(data: bytes, source: str) -> dict[str, object]:
    """Parse one JSON object; ``source`` names it in errors.

    Raises:
        CheckpointError: as ``read_json_object``.
    """
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(items)
        if len(values) < len(items):
            names = [name for name, _ in items]
            duplicates.extend(name for name in values if names.count(name) > 1)
        return values

    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source}: not UTF-8 at byte {error.start}; expected JSON") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{source}: malformed JSON at {where}; expected an object") from error
    except RecursionError as error:
        raise CheckpointError(f"{source}: nested too deeply; expected a flat JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: a JSON {type(value).__name__}; expected an object")
    if duplicates:
        raise CheckpointError(f'{source}: key "{duplicates[0]}" is given twice; expected once')
    parsed = cast(dict[str, object], value)
    _require_finite(parsed, "", source)
    return parsed


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else math.inf


def _require_finite(value: object, key: str, source: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f'{source}: "{key}" is {value} or overflows; expected a finite number')
    if isinstance(value, dict):
        for name, item in cast(dict[str, object], value).items():
            _require_finite(item, f"{key}.{name}" if key else name, source)
    if isinstance(value, list):
        for index, item in enumerate(cast(list[object], value)):
            _require_finite(item, f"{key}[{index}]", source)
