"""Clients that ask, read as the tokens come, and know what the answer should have been."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2

from deployments.client import AsyncClient, CallFailed, Started, Tokens, ask, conversation
from deployments.rpc.dflash.v1 import dflash_pb2 as pb

TIMEOUT_S = 180.0
CHAT = "/v1/chat/completions"
# What a client is told where no server of ours answered.
NEVER_ARRIVED = frozenset({"ConnectError", "ConnectTimeout"})
CUT = frozenset({"ReadError", "WriteError", "RemoteProtocolError", "cut", "connection", "not ours"})


@dataclass(frozen=True)
class Question:
    """A request whose tokens are known beforehand; without ``stop`` there are ``max_tokens`` of them."""

    text: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    stop: str = ""

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The request over HTTP."""
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        body |= {"n": self.n} if self.n > 1 else {}
        body |= {"stop": self.stop} if self.stop else {}
        return body | ({"stream_options": {"continuous_usage_stats": True}} if stream else {})

    def spec(self) -> pb.GenerationSpec:
        """The request over gRPC."""
        sampling = pb.Sampling(temperature=self.temperature, seed=self.seed)
        stopping = pb.Stopping(ignore_eos=True, strings=[self.stop] if self.stop else [])
        turns = conversation(("user", self.text))
        return ask("demo", turns, max_tokens=self.max_tokens, sampling=sampling, stopping=stopping)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one round gave one stream. ``drafted`` is None where the stream does not tell."""

    at: float
    num_tokens: int
    drafted: int | None
    is_inner: bool  # neither the first token, which no round made, nor the last, which needs no draft


@dataclass
class Heard:
    """One answer as its client got it."""

    question: Question
    began: float = field(default_factory=time.monotonic)
    choices: dict[int, list[int]] = field(default_factory=dict)  # token ids
    samples: list[Sample] = field(default_factory=list)
    places: list[tuple[float, str]] = field(default_factory=list)  # when it got a place, and on which lane
    num_comments: int = 0
    is_rpc: bool = False
    status: int = 0  # HTTP's, or the one that a gRPC code stands for; 0: no answer began
    error: str = ""  # the kind, or the exception's name
    detail: str = ""
    retry_after_s: float | None = None
    ended: float = 0.0
    was_left: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.choices.values()))

    @property
    def seconds(self) -> float:
        """From asking to the end."""
        return self.ended - self.began

    @property
    def may_have_finished(self) -> bool:
        """Whether the server may have come to an end that this client did not see."""
        is_sent = (
            self.status == 0 and self.error in CUT and not self.is_rpc
        )  # a whole answer tells nothing before
        return self.was_left or (bool(self.error) and (self.status == 200 or is_sent))

    def note(self, ids: Sequence[int], drafted: int | None, index: int = 0) -> None:
        """Tokens of a choice came."""
        choice = self.choices.setdefault(index, [])
        is_inner = bool(choice) and len(choice) + 1 < self.question.max_tokens
        self.samples.append(Sample(time.monotonic(), len(ids), drafted, is_inner))
        choice.extend(ids)


class HttpClient:
    """Streams over HTTP under one key."""

    def __init__(self, url: str, key: str, *, most_connections: int = 64):
        limits = httpx2.Limits(max_connections=most_connections)
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=headers, limits=limits)

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def whole(self, question: Question, heard: Heard | None = None) -> Heard:
        """The answer in one piece."""
        heard = heard or Heard(question)
        try:
            response = await self._client.post(CHAT, json=question.body(stream=False))
            heard.status = response.status_code
            if response.status_code == 200:
                for choice in response.json()["choices"]:
                    heard.note(choice["token_ids"], None, choice["index"])
            else:
                _note_refusal(heard, response, response.content)
        except httpx2.HTTPError as error:
            heard.error = type(error).__name__
        heard.ended = time.monotonic()
        return heard

    async def post(self, body: Any) -> httpx2.Response:
        """Anything at all."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._client.post(CHAT, content=content, headers={"content-type": "application/json"})

    async def stream(self, question: Question, heard: Heard, *, leave_after: int | None = None) -> Heard:
        """Read an answer into ``heard``; ``leave_after`` so many tokens close the connection."""
        try:
            await self._stream(question, heard, leave_after)
        except httpx2.HTTPError as error:
            heard.error = heard.error or type(error).__name__
        heard.ended = time.monotonic()
        return heard

    async def _stream(self, question: Question, heard: Heard, leave_after: int | None) -> None:
        async with self._client.stream("POST", CHAT, json=question.body(stream=True)) as response:
            heard.status = response.status_code
            if response.status_code != 200:
                _note_refusal(heard, response, await response.aread())
                return
            drafted = 0
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    heard.num_comments += 1
                if line == "data: [DONE]":
                    return
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    heard.error, heard.detail = chunk["error"]["code"], chunk["error"]["message"]
                    continue
                drafted = _take(chunk, heard, drafted)
                if leave_after is not None and heard.num_tokens >= leave_after:
                    heard.was_left = True
                    return
            heard.error = heard.error or "cut"


def _take(chunk: dict[str, Any], heard: Heard, drafted: int) -> int:
    """A chunk's tokens; gives the number of drafts up to now."""
    details = (chunk.get("usage") or {}).get("completion_tokens_details")
    if details is None:
        return drafted
    total = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    for choice in chunk["choices"]:
        if ids := choice.get("token_ids"):
            heard.note(ids, total - drafted, choice["index"])
    return total


def _note_refusal(heard: Heard, response: httpx2.Response, body: bytes) -> None:
    heard.error, heard.detail = _error_of(body)
    seconds = response.headers.get("retry-after", "")
    heard.retry_after_s = float(seconds) if seconds.isdecimal() else None


def _error_of(body: bytes) -> tuple[str, str]:
    try:
        error = json.loads(body)["error"]
        return error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return "not ours", body[:200].decode(errors="replace")  # Ray's proxy spoke


class RpcClient:
    """Streams over gRPC under one key, by this project's own client."""

    def __init__(self, address: str, key: str):
        self._client = AsyncClient(address, api_key=key)

    async def __aenter__(self) -> "RpcClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def stream(
        self,
        question: Question,
        heard: Heard,
        *,
        leave_after: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Heard:
        """Read an answer into ``heard``; ``leave_after`` so many tokens cancel the call."""
        heard.is_rpc = True
        try:
            async with aclosing(self._client.generate(question.spec(), timeout_s=timeout_s)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        heard.status = 200
                        heard.places.append((time.monotonic(), event.lane))
                    elif isinstance(event, Tokens):
                        heard.note([token.id for token in event.tokens], None)
                    if leave_after is not None and heard.num_tokens >= leave_after:
                        heard.was_left = True
                        break
        except CallFailed as error:
            heard.error, heard.detail, heard.retry_after_s = error.kind, error.details, error.retry_after
            if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                heard.status = 429
        heard.ended = time.monotonic()
        return heard


Client = HttpClient | RpcClient


async def in_turn(questions: Sequence[Question], is_over: asyncio.Event) -> AsyncIterator[Question]:
    """One question after the other, round and round, until told that it is enough."""
    number = 0
    while not is_over.is_set():
        yield questions[number % len(questions)]
        number += 1
