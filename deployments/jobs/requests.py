"""The input of a batch: one request a line, as OpenAI's batch files have them."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from deployments.jobs.files import open_input
from deployments.jobs.lines import LineTooLong, bounded_lines, is_nested_deeper
from dflash_core.errors import InvalidRequest

CHAT_URL = "/v1/chat/completions"
URLS = (CHAT_URL, "/v1/completions", "/v1/responses")

T = TypeVar("T")
_MAX_SHOWN = 100  # characters of a custom_id in a message


@dataclass(frozen=True, slots=True)
class Request:
    """A line that can be sent."""

    number: int  # of the line, from 1
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent; the others can."""

    number: int
    custom_id: str | None  # None: the line has none that could be read
    code: str
    message: str


Line = Request | BadLine


def read_lines(path: str) -> Iterator[Line]:
    """Every line of the input that is not empty, in order.

    Raises OSError if there is no such file, InvalidRequest if it is compressed and broken.
    """
    with open_input(path) as stream:
        for number, line in enumerate(_unpacked(bounded_lines(stream), path), start=1):
            if isinstance(line, LineTooLong):
                yield BadLine(number, None, "line_too_long", f"line {number} is {line}")
                continue
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield parse_line(text, number)


def _unpacked(lines: Iterable[T], path: str) -> Iterator[T]:
    try:
        yield from lines
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{path}: is cut short, or not compressed as its name says: {error}") from None


def parse_line(text: bytes, number: int) -> Line:
    """Read one line. ``method`` and ``url`` may be left out of a chat request."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, "invalid_json_line", f"line {number} is not JSON: {error}")
    if not isinstance(entry, dict):
        return BadLine(number, None, "invalid_json_line", f"line {number} is not a JSON object")
    if is_nested_deeper(entry):
        return BadLine(number, None, "invalid_json_line", f"line {number} is nested too deeply")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "missing_custom_id", f"line {number} has no custom_id, a string")
    method, url, body = entry.get("method", "POST"), entry.get("url", CHAT_URL), entry.get("body")
    if method != "POST":
        return BadLine(number, custom_id, "invalid_method", f"line {number}: method must be POST")
    if url not in URLS:
        return BadLine(number, custom_id, "invalid_url", f"line {number}: url must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        return BadLine(number, custom_id, "invalid_body", f"line {number}: body must be a JSON object")
    if body.get("stream"):
        return BadLine(number, custom_id, "invalid_body", f"line {number}: a batch does not stream")
    return Request(number, custom_id, url, body)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a look through the whole input finds, before anything is sent."""

    num_lines: int  # empty ones do not count
    custom_ids: frozenset[str]


def survey(path: str) -> Survey:
    """Count the lines, and see that no two of them would have results that cannot be told apart.

    Raises InvalidRequest naming the lines that share a ``custom_id``, or if there is no line at all.
    """
    seen: dict[str, int] = {}
    num_lines = 0
    for line in read_lines(path):
        num_lines += 1
        if line.custom_id is None:
            continue
        if line.custom_id in seen:
            raise InvalidRequest(
                f"{path}: lines {seen[line.custom_id]} and {line.number} have the same custom_id "
                f"{line.custom_id[:_MAX_SHOWN]!r}"
            )
        seen[line.custom_id] = line.number
    if num_lines == 0:
        raise InvalidRequest(f"{path}: holds no requests")
    return Survey(num_lines, frozenset(seen))
