"""Results that cost time and are kept on disk from one start to the next."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger("dflash.kept")

T = TypeVar("T")


def read_kept(file: Path | None, parse: Callable[[Any], T]) -> T | None:
    """What an earlier start wrote; None where there is no file, or none that can be read."""
    if file is None:
        return None
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None


def write_kept(file: Path, data: Any) -> None:
    """Write beside the file and rename: another process may read it at this moment."""
    fresh = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(data), encoding="utf-8")
        fresh.replace(file)
    except OSError as error:
        logger.info("%s is not kept: %s", file.name, error)
