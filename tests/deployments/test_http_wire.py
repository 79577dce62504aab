"""Bytes, headers and order on the wire."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator

import httpx2
import pytest

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.openai.limits import Limits
from dflash_core.errors import RowFailed
from tests.deployments.http_stub import StubBackend, chat, events, failing, serving, two_rounds


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, httpx2.Client]]:
    backend = StubBackend()
    limits = Limits(peek_s=0.1, keepalive_s=0.1)
    with serving(backend, limits=limits) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield backend, client


@pytest.fixture
def backend(served: tuple[StubBackend, httpx2.Client]) -> StubBackend:
    served[0].script = two_rounds
    return served[0]


@pytest.fixture
def client(served: tuple[StubBackend, httpx2.Client], backend: StubBackend) -> httpx2.Client:
    return served[1]


def stream(client: httpx2.Client, **fields: object) -> list[dict]:
    """Post a streamed chat and return its chunks, checking that ``[DONE]`` ends it."""
    response = client.post("/v1/chat/completions", json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    blocks = [block for block in events(response) if not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_stream_has_the_order_that_clients_expect(client: httpx2.Client):
    chunks = stream(client, stream_options={"include_usage": True})
    shapes = [
        (c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) if c["choices"] else "usage"
        for c in chunks
    ]
    assert shapes == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hello"}, None),
        ({"content": ", world"}, None),
        ({}, "stop"),
        "usage",
    ]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert [c["usage"] is None for c in chunks] == [True, True, True, True, False]
    assert chunks[-1]["dflash"]["accepted"] == 3
    assert chunks[-2]["dflash"] == chunks[-1]["dflash"]


def test_without_stream_options_no_chunk_has_usage(client: httpx2.Client):
    assert all("usage" not in chunk for chunk in stream(client))


def test_continuous_usage_runs_along(client: httpx2.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 3, 5, 5, 5]


def test_a_stream_forbids_caching_and_buffering(client: httpx2.Client):
    response = client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_token_ids_come_when_asked_for(client: httpx2.Client, backend: StubBackend):
    chunks = stream(client, return_token_ids=True)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[], [11, 12, 13], [14, 15], []]
    assert chunks[0]["prompt_token_ids"] == list(backend.last.prompt_ids)
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    whole = client.post("/v1/chat/completions", json=chat(return_token_ids=True)).json()
    assert whole["choices"][0]["token_ids"] == [11, 12, 13, 14, 15]
    assert whole["prompt_token_ids"] == list(backend.last.prompt_ids)
    plain = client.post("/v1/chat/completions", json=chat()).json()
    assert "token_ids" not in plain["choices"][0]


def test_completion_chunks_have_text_and_prompt_ids_in_the_choice(client: httpx2.Client):
    body = {"model": "stub-model", "prompt": [5, 6], "stream": True, "return_token_ids": True}
    blocks = events(client.post("/v1/completions", json=body))
    choices = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks[:-1]]
    assert [choice["text"] for choice in choices] == ["Hello", ", world", ""]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in choices[1]


def test_a_round_whose_text_is_held_back_makes_no_chunk(client: httpx2.Client, backend: StubBackend):
    async def held(generation: Generation) -> AsyncGenerator[Event, None]:
        yield TextTokens("", (240,), Usage(1, 1))
        yield TextTokens("\U0001f600", (159,), Usage(1, 2))
        yield Ended("length", Usage(1, 2))

    backend.script = held
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(client)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "\U0001f600"}, {}]
    assert len(stream(client, return_token_ids=True)) == 4


def test_an_empty_answer_still_opens_with_the_role(client: httpx2.Client, backend: StubBackend):
    async def empty(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Ended("stop", Usage(1, 1), stop_reason="x")

    backend.script = empty
    choices = [chunk["choices"][0] for chunk in stream(client)]
    assert [choice["delta"] for choice in choices] == [{"role": "assistant", "content": ""}, {}]
    assert choices[-1]["stop_reason"] == "x"


def test_line_breaks_stay_inside_one_event(client: httpx2.Client, backend: StubBackend):
    text = "a\n\nb\r\ndata: [DONE]\u2028c"

    async def lines(generation: Generation) -> AsyncGenerator[Event, None]:
        yield TextTokens(text, (1,), Usage(1, 1))
        yield Ended("stop", Usage(1, 1))

    backend.script = lines
    assert stream(client)[1]["choices"][0]["delta"]["content"] == text


def test_a_failure_after_the_first_byte_is_an_event_before_done(client: httpx2.Client, backend: StubBackend):
    backend.script = failing(RowFailed("non-finite logits"), TextTokens("a", (1,), Usage(1, 1)))
    response = client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    *_, error, done = events(response)
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": "non-finite logits",
        "type": "server_error",
        "param": None,
        "code": "row_failed",
    }


def test_a_bug_in_a_stream_shows_only_the_request_id(
    client: httpx2.Client, backend: StubBackend, caplog: pytest.LogCaptureFixture
):
    backend.script = failing(KeyError("secret path"), TextTokens("a", (1,), Usage(1, 1)))
    headers = {"x-request-id": "abc-1"}
    response = client.post("/v1/chat/completions", json=chat(stream=True), headers=headers)
    assert "secret path" not in response.text
    assert "abc-1" in events(response)[-2]
    assert "secret path" in caplog.text  # the operator's part
    assert "abc-1" in caplog.text


def test_a_slow_start_keeps_the_connection_alive_with_comments(client: httpx2.Client, backend: StubBackend):
    async def slow(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Started("w", "l")
        await asyncio.sleep(0.35)
        async for event in two_rounds(generation):
            yield event

    backend.script = slow
    response = client.post("/v1/chat/completions", json=chat(stream=True))
    blocks = events(response)
    assert blocks[0] == ": keep-alive"
    assert blocks.count(": keep-alive") >= 2
    first_data = next(block for block in blocks if not block.startswith(":"))
    assert '"role":"assistant"' in first_data


def test_a_failure_within_the_peek_has_a_status_and_later_it_is_an_event(
    client: httpx2.Client, backend: StubBackend
):
    async def fail_after(seconds: float) -> AsyncGenerator[Event, None]:
        yield Started("w", "l")
        await asyncio.sleep(seconds)
        raise RowFailed("no")

    backend.script = lambda generation: fail_after(0.01)
    assert client.post("/v1/chat/completions", json=chat(stream=True)).status_code == 500
    backend.script = lambda generation: fail_after(0.2)
    late = client.post("/v1/chat/completions", json=chat(stream=True))
    assert late.status_code == 200
    assert '"code":"row_failed"' in events(late)[-2]


def test_events_that_stop_without_an_end_are_an_internal_error(client: httpx2.Client, backend: StubBackend):
    async def cut(generation: Generation) -> AsyncGenerator[Event, None]:
        yield TextTokens("a", (1,), Usage(1, 1))

    backend.script = cut
    response = client.post("/v1/chat/completions", json=chat())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


def test_a_slow_answer_that_is_not_streamed_waits_past_peek_and_keepalive(
    client: httpx2.Client, backend: StubBackend
):
    async def slow(generation: Generation) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.3)
        async for event in two_rounds(generation):
            yield event

    backend.script = slow
    answer = client.post("/v1/chat/completions", json=chat()).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, world"


def test_the_generator_returns_by_itself_after_its_last_event(client: httpx2.Client, backend: StubBackend):
    steps: list[str] = []

    async def tidy(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Ended("stop", Usage(1, 1))
        await asyncio.sleep(0.05)
        steps.append("tidied")

    backend.script = tidy
    for is_stream in (False, True):
        client.post("/v1/chat/completions", json=chat(stream=is_stream))
        assert backend.closed.wait(2)
    assert steps == ["tidied", "tidied"]
