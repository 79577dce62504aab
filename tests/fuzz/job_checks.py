"""What must hold for the files of batch jobs."""

import json
from functools import cache
from pathlib import Path

from deployments.jobs import results
from deployments.jobs.requests import BadLine, Request, parse_line, read_lines
from deployments.prompts import parse_prompts
from dflash_core.errors import InvalidRequest
from tests.deployments.http_stub import tokenizer
from tests.fuzz.files import fresh_folder


@cache
def scratch() -> Path:
    """A folder to write inputs to."""
    return fresh_folder()


def batch_line(line: bytes) -> None:
    """Any line of a batch file is a request that can be sent, or says what is wrong with it."""
    parsed = parse_line(line, 7)
    if isinstance(parsed, Request):
        json.dumps(parsed.body)
        return
    assert isinstance(parsed, BadLine)
    assert "line 7" in parsed.message
    assert len(parsed.message) < 500
    results.of_failure(parsed, parsed.code, parsed.message).encode()


def batch_file(content: tuple[str, bytes]) -> None:
    """Any file, packed or not: lines, or one clear message."""
    ending, data = content
    path = scratch() / f"input.jsonl{ending}"
    path.write_bytes(data)
    try:
        found = list(read_lines(str(path)))
    except (InvalidRequest, OSError):
        return
    numbers = [line.number for line in found]
    assert numbers == sorted(set(numbers))


def batch_result(line: bytes) -> None:
    """Any line of an earlier output is a result or none; nothing else is raised."""
    try:
        result = results.parse(line)
    except ValueError:
        return
    assert results.parse(result.encode()) == result


def prompts(line: bytes) -> None:
    """Any file of prompts is read or refused with its line."""
    refusal = "prompts.jsonl"
    try:
        parse_prompts(line.decode(errors="replace"), "prompts.jsonl", tokenizer())
    except InvalidRequest as error:
        refusal = str(error)
    assert "prompts.jsonl" in refusal
