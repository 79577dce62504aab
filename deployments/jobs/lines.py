"""Lines of a file that anybody may have written: none is held that is longer than a request can be."""

from collections.abc import Iterator
from typing import IO, Any

MAX_LINE_BYTES = 32 * 2**20  # a server takes 8 MiB of body by default
MAX_DEPTH = 100  # of JSON; the server reads twice as much
_CHUNK_BYTES = 2**20


class LineTooLong(ValueError):
    """A line that was passed over, and not kept."""


def bounded_lines(stream: IO[bytes], most: int = MAX_LINE_BYTES) -> Iterator[bytes | LineTooLong]:
    """Every line, with its end; one of more than ``most`` bytes is read past, whatever its length."""
    while line := stream.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(_CHUNK_BYTES)
        yield LineTooLong(f"longer than {most} bytes")


def is_nested_deeper(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects of a JSON value lie more than ``most`` deep inside each other."""
    level = [value]
    for _ in range(most):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, dict | list))
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict | list))
