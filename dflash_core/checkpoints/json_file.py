"""Strict JSON: one object per file, no duplicate key, every number finite and of sane length."""

import json
import math
import stat
from pathlib import Path
from typing import cast

from dflash_core.errors import CheckpointError

CONFIG = "config.json"
MAX_JSON_BYTES = 32 * 2**20
_MAX_INT_DIGITS = 20  # what no key of a checkpoint needs; Python itself refuses to parse 4300
_MAX_DEPTH = 64  # Python's own reader, printer and garbage collector recurse


def read_json_object(path: Path) -> dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        CheckpointError: no such file, no plain file, unreadable, larger than 32 MiB, malformed, nested too
            deeply, not an object, a key given twice, or a number that is not finite.
    """
    return parse_json_object(_read(path), str(path))


def read_loose_json(path: Path) -> dict[str, object]:
    """Read the JSON object in a file that others write less carefully: tokenizers say 1e30 for "no limit".

    Raises:
        CheckpointError: as ``read_json_object``, but for keys given twice and numbers.
    """
    return parse_json_object(_read(path), str(path), is_strict=False)


def read_plain_text(path: Path) -> str:
    """Read a file of text.

    Raises:
        CheckpointError: as ``read_json_object``, for what is no file and no UTF-8.
    """
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}; expected text") from error


def _read(path: Path) -> bytes:
    try:
        if require_plain_file(path) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes; expected a small file")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; expected a checkpoint's {path.name}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def read_config(path: Path) -> dict[str, object]:
    """Read ``config.json`` of a checkpoint directory; raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected a checkpoint directory")
    return read_json_object(path / CONFIG)


def require_plain_file(path: Path) -> int:
    """Return a file's size; a pipe or a device, which may have no end, is refused unopened.

    Raises CheckpointError, OSError.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: no plain file; expected a checkpoint's {path.name}")
    return found.st_size


def parse_json_object(data: bytes, source: str, *, is_strict: bool = True) -> dict[str, object]:
    """Parse one JSON object; ``source`` names it in errors.

    Not strict, it may give a key twice (the last counts) and have any number.

    Raises:
        CheckpointError: as ``read_json_object``.
    """
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(items)
        if len(values) < len(items):
            seen: set[str] = set()
            duplicates.append(next(name for name, _ in items if name in seen or seen.add(name)))
        return values

    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source}: not UTF-8 at byte {error.start}; expected JSON") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{source}: malformed JSON at {where}; expected an object") from error
    except RecursionError as error:
        raise _too_deep(source) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: a JSON {type(value).__name__}; expected an object")
    if duplicates and is_strict:
        raise CheckpointError(f'{source}: key "{duplicates[0]}" is given twice; expected once')
    parsed = cast(dict[str, object], value)
    _check_values(parsed, source, is_strict)
    return parsed


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else math.inf


def _check_values(document: dict[str, object], source: str, is_strict: bool) -> None:
    """Look at every value, without recursion: what could be read may be nested more deeply than we can."""
    waiting: list[tuple[str, object, int]] = [("", document, 1)]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise _too_deep(source)
        if is_strict and isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f'{source}: "{key}" is {value} or overflows; expected a finite number')
        if isinstance(value, str) and not _is_unicode(value):
            raise CheckpointError(f'{source}: "{key}" has half a surrogate pair; expected valid Unicode')
        if isinstance(value, dict):
            items = cast(dict[str, object], value).items()
            waiting += ((f"{key}.{name}" if key else name, item, depth + 1) for name, item in items)
            waiting += ((f"{key} (a key)", name, depth) for name, _ in items if not name.isascii())
        elif isinstance(value, list):
            waiting += ((f"{key}[{i}]", item, depth + 1) for i, item in enumerate(cast(list[object], value)))


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(source: str) -> CheckpointError:
    return CheckpointError(f"{source}: nested too deeply; expected a flat JSON object")
