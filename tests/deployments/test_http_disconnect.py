"""A client that goes away: its generator is closed at once, wherever it was."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from urllib.parse import urlsplit

import pytest

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.openai.limits import Limits
from tests.deployments.http_stub import Script, StubBackend, chat, serving

PROMPT_S = 1.0  # well under any keep-alive or round that could hide a late close


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, str]]:
    backend = StubBackend()
    with serving(backend, limits=Limits(peek_s=0.2, keepalive_s=30)) as url:
        yield backend, url


async def silent(generation: Generation) -> AsyncGenerator[Event, None]:
    await asyncio.sleep(60)
    yield Started("w", "l")


async def one_then_silent(generation: Generation) -> AsyncGenerator[Event, None]:
    yield Started("w", "l")
    yield TextTokens("a", (1,), Usage(1, 1))
    await asyncio.sleep(60)


async def endless(generation: Generation) -> AsyncGenerator[Event, None]:
    yield Started("w", "l")
    for count in range(1, 1_000_000):
        yield TextTokens("word " * 50, (1,), Usage(1, count))
        await asyncio.sleep(0)


async def one_of_two_ends(generation: Generation) -> AsyncGenerator[Event, None]:
    yield TextTokens("a", (1,), Usage(1, 1))
    yield Ended("stop", Usage(1, 1))
    await asyncio.sleep(60)


def post(url: str, body: dict[str, object]) -> socket.socket:
    address = urlsplit(url)
    data = json.dumps(body).encode()
    raw = socket.create_connection((address.hostname, address.port), timeout=5)
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(data) + data
    )
    return raw


def wait_until_open(backend: StubBackend, count: int) -> None:
    until = time.monotonic() + 5
    while len(backend.generations) < count:
        assert time.monotonic() < until, "the generator was never opened"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, one_then_silent, endless])
def test_the_generator_is_closed_when_the_client_leaves(
    served: tuple[StubBackend, str], script: Script, stream: bool
):
    backend, url = served
    backend.script = script
    before = len(backend.generations)
    with post(url, chat(stream=stream)) as client:
        wait_until_open(backend, before + 1)
        if stream and script is not silent:
            assert client.recv(10).startswith(b"HTTP/1.1")
        assert not backend.closed.wait(0.05)  # the control: it is open while the client is there
    assert backend.closed.wait(PROMPT_S)


def test_a_client_that_leaves_after_the_headers_of_a_silent_stream_is_noticed(
    served: tuple[StubBackend, str],
):
    backend, url = served
    backend.script = silent
    with post(url, chat(stream=True)) as client:
        assert client.recv(10).startswith(b"HTTP/1.1")  # after the peek
        assert not backend.closed.is_set()
    assert backend.closed.wait(PROMPT_S)


def test_a_client_that_stops_reading_holds_back_its_generator(served: tuple[StubBackend, str]):
    backend, url = served
    produced = 0

    async def counted(generation: Generation) -> AsyncGenerator[Event, None]:
        nonlocal produced
        async for event in endless(generation):
            produced += 1
            yield event

    backend.script = counted
    with post(url, chat(stream=True)):
        until = time.monotonic() + 10
        before = -1
        while produced != before:  # stands still once all buffers are full
            assert time.monotonic() < until, "the generator runs away from its client"
            before = produced
            time.sleep(0.3)
        assert produced > 0
    assert backend.closed.wait(PROMPT_S)


def test_others_go_on_when_one_leaves(served: tuple[StubBackend, str]):
    backend, url = served

    async def slow(generation: Generation) -> AsyncGenerator[Event, None]:
        for count in range(1, 6):
            yield TextTokens(str(count), (count,), Usage(1, count))
            await asyncio.sleep(0.05)
        raise RuntimeError("end of the script")

    backend.script = slow
    with post(url, chat(stream=True)) as stays:
        leaves = post(url, chat(stream=True))
        assert leaves.recv(10)
        leaves.close()
        text = b""
        while b"[DONE]" not in text:
            text += stays.recv(65536)
    assert all(b'"content":"%d"' % count in text for count in range(1, 6))


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_is_done_holds_nothing_up(served: tuple[StubBackend, str], stream: bool):
    """After its last event a generator gets a second to return by itself; after another, none."""
    backend, url = served
    backend.script = one_of_two_ends
    before = len(backend.generations)
    with post(url, chat(stream=stream, n=2)):
        wait_until_open(backend, before + 1)
        assert not backend.closed.wait(0.3)
    assert backend.closed.wait(0.5)
