"""Chats from an OpenAI batch file as rows for the engine: what parity and benchmarks play."""

import json
from dataclasses import replace
from pathlib import Path

from deployments.openai.parse import parse_document
from deployments.openai.schema import ChatRequest
from dflash_core.errors import InvalidRequest
from dflash_core.request import RowId, RowRequest, Sampling
from dflash_core.text import Tokenizer

DEFAULT_MAX_TOKENS = 160


def read_prompts(
    file: Path, tokenizer: Tokenizer, *, limit: int | None = None, sampling: Sampling | None = None
) -> list[RowRequest]:
    """The file's first ``limit`` chat requests, tokenised. ``sampling`` overrides seed by line number.

    Raises InvalidRequest naming the line that is not a chat request, OSError if there is no file.
    """
    return parse_prompts(read_text(file), str(file), tokenizer, limit=limit, sampling=sampling)


def read_text(file: Path) -> str:
    """The text of a file of prompts, without a byte order mark. Raises InvalidRequest, OSError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file}: not UTF-8 (byte {error.start})") from None


def parse_prompts(
    text: str,
    name: str,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    sampling: Sampling | None = None,
) -> list[RowRequest]:
    """``read_prompts`` of a file called ``name`` whose text is at hand."""
    rows: list[RowRequest] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(rows) >= limit:
            break
        if line.strip():
            rows.append(_parse(line, number, name, tokenizer, sampling))
    if not rows:
        raise InvalidRequest(f"{name}: holds no requests")
    return rows


def _parse(line: str, number: int, file: str, tokenizer: Tokenizer, sampling: Sampling | None) -> RowRequest:
    where = f"{file}, line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("body"), dict):
        raise InvalidRequest(f"{where}: not a chat request of a batch file: it has no object 'body'")
    name, body = str(entry.get("custom_id", number)), {"model": "-", **entry["body"]}
    try:
        request = parse_document(body, ChatRequest)
        tokens = tokenizer.apply_chat(body["messages"], tools=body.get("tools"))
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}", param=error.param) from None
    chosen = Sampling(
        temperature=request.temperature or 0.0,
        seed=number if request.seed is None else request.seed % 2**64,
    )
    if sampling is not None:
        chosen = replace(sampling, seed=number)
    stops = frozenset[int]() if request.ignore_eos else tokenizer.eos_token_ids
    max_tokens = request.max_completion_tokens or request.max_tokens or DEFAULT_MAX_TOKENS
    return RowRequest(RowId(name), tuple(tokens), max_tokens, chosen, stops)
