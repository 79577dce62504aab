"""A backend whose events are scripted, served by a real uvicorn on loopback."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

import dflash_core.pair
from deployments.generation import (
    Ended,
    Event,
    Generation,
    ModelCard,
    SamplingDefaults,
    Started,
    TextTokens,
    Usage,
)
from deployments.http import create_app
from deployments.openai.limits import Limits
from deployments.telemetry import Snapshot, Statistics
from deployments.view import Overview, RouterView
from dflash_core.events import TokenLogprobs
from dflash_core.text.tokenizer import Tokenizer

CONTEXT = 300
Script = Callable[[Generation], AsyncGenerator[Event, None]]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(dflash_core.pair.__file__).parent / "target")


async def two_rounds(generation: Generation) -> AsyncGenerator[Event, None]:
    """``Hello, world`` in two rounds of 15 drafts: 3 walked and 2 accepted, then 1 and 1.

    Choices go side by side; each token's log-probability is told by ``number``.
    """
    prompt, choices = len(generation.prompt_ids), range(generation.num_choices)
    first = Usage(prompt, 3, rounds=1, drafted=15, walked=3, accepted=2)
    last = Usage(prompt, 5, rounds=2, drafted=30, walked=4, accepted=3)
    before = numbers(generation, generation.prompt_ids[1:]) if generation.wants_prompt_logprobs else ()
    for index in choices:
        yield Started("window-1", "lane-1")
        ids = (11, 12, 13)
        yield TextTokens("Hello", ids, first, index, numbers(generation, ids), before)
    for index in choices:
        ids = (14, 15)
        yield TextTokens(", world", ids, last, index, numbers(generation, ids))
        yield Ended("stop", last, index=index)


def number(token_id: int, num_top: int) -> TokenLogprobs:
    """What the stub tells of a token: the likeliest ones are its neighbours above, and itself second."""
    others = (token_id + 1, token_id, *range(token_id + 2, token_id + 30))
    return TokenLogprobs(-token_id / 8, tuple((other, -1.0 - i) for i, other in enumerate(others[:num_top])))


def numbers(generation: Generation, ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """What it tells of some, if asked."""
    num_top = generation.num_top_logprobs
    return () if num_top is None else tuple(number(token_id, num_top) for token_id in ids)


def failing(error: Exception, *events: Event) -> Script:
    """A script that plays ``events``, then raises."""

    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        for event in events:
            yield event
        raise error

    return script


class StubBackend:
    """Plays ``script`` and counts what was opened and closed."""

    def __init__(self) -> None:
        self.model_card = ModelCard(
            names=("stub-model", "org/stub"),
            created=1_700_000_000,
            max_context=CONTEXT,
            defaults=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20),
            drafter="stub-drafter",
            block_size=16,
        )
        self.tokenizer = tokenizer()
        self.script: Script = two_rounds
        self.generations: list[Generation] = []
        self.closed = threading.Event()
        self.state: Mapping[str, object] = {"status": "ok"}
        self.statistics = Statistics("stub-model", "router-0")

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        self.generations.append(generation)
        self.closed.clear()
        try:
            async for event in self.script(generation):
                yield event
        finally:
            self.closed.set()

    async def health(self) -> Mapping[str, object]:
        return self.state

    async def snapshot(self) -> Sequence[Snapshot]:
        return (self.statistics.snapshot(),)

    async def overview(self) -> Overview:
        return Overview("router-0", (RouterView.now(self.statistics.snapshot()),))

    @property
    def last(self) -> Generation:
        return self.generations[-1]


@contextmanager
def serving(
    backend: StubBackend, *, limits: Limits | None = None, api_keys: tuple[str, ...] = ()
) -> Iterator[str]:
    """Serve the backend; gives the base URL."""
    app = create_app(backend, limits=limits, api_keys=api_keys)
    # With the protocol left at 0, asyncio does not switch Nagle off: 40 ms a request.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            until = time.monotonic() + 10
            while not server.started:
                assert time.monotonic() < until, "uvicorn did not start"
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def chat(**fields: object) -> dict[str, object]:
    """A body for the chat endpoint."""
    return {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], **fields}


def events(response: httpx2.Response) -> list[str]:
    """The blocks of an event stream."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    return blocks


def say(backend: StubBackend, text: str, reason: Any = "stop") -> None:
    """Let the model say ``text``, seven characters a round."""

    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        usage = Usage(len(generation.prompt_ids))
        for start in range(0, len(text), 7):
            usage = Usage(usage.prompt_tokens, usage.completion_tokens + 2, rounds=start // 7 + 1)
            yield TextTokens(text[start : start + 7], (11, 12), usage)
        yield Ended(reason, usage)

    backend.script = script
