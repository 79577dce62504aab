"""Log-probabilities, several choices and the echoed prompt, as clients get them."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx2
import openai
import pytest

from deployments.generation import Ended, Event, Generation, TextTokens, Usage
from tests.deployments.http_stub import StubBackend, chat, events, number, serving, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IDS = (11, 12, 13, 14, 15)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, httpx2.Client]]:
    backend = StubBackend()
    with serving(backend) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield backend, client


@pytest.fixture
def backend(served: tuple[StubBackend, httpx2.Client]) -> Iterator[StubBackend]:
    backend, _ = served
    script = backend.script
    yield backend
    backend.script = script


@pytest.fixture
def client(served: tuple[StubBackend, httpx2.Client]) -> httpx2.Client:
    return served[1]


def complete(**fields: object) -> dict[str, object]:
    return {"model": "stub-model", "prompt": [40, 41, 42], **fields}


def ask(client: httpx2.Client, path: str, body: dict[str, object]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx2.Client, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    blocks = events(client.post(path, json={**body, "stream": True}))
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def text(token_id: int) -> str:
    return tokenizer().decode([token_id], skip_special=False)


# Log-probabilities of chats


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_a_chat_tells_of_each_token(client: httpx2.Client, num_top: int | None):
    choice = ask(client, CHAT, chat(logprobs=True, top_logprobs=num_top))["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in content] == [text(i) for i in IDS]
    assert [entry["bytes"] for entry in content] == [list(text(i).encode()) for i in IDS]
    assert [entry["logprob"] for entry in content] == [-i / 8 for i in IDS]
    for entry, token_id in zip(content, IDS, strict=True):
        tops = number(token_id, num_top or 0).top
        told = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert told == [(text(i), logprob) for i, logprob in tops]


def test_a_streamed_chat_tells_the_same_in_the_chunk_of_each_round(client: httpx2.Client):
    body = chat(logprobs=True, top_logprobs=2)
    whole = ask(client, CHAT, body)["choices"][0]["logprobs"]["content"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in stream(client, CHAT, body)]
    assert [chunk and len(chunk["content"]) for chunk in chunks] == [None, 3, 2, None]
    assert chunks[1]["content"] + chunks[2]["content"] == whole


def test_a_token_whose_text_is_held_back_is_told_at_once(client: httpx2.Client, backend: StubBackend):
    async def held(generation: Generation) -> AsyncGenerator[Event, None]:
        yield TextTokens("", (240,), Usage(1, 1), logprobs=(number(240, 0),))
        yield Ended("length", Usage(1, 1))

    backend.script = held
    chunks = stream(client, CHAT, chat(logprobs=True))
    assert [len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"]) for chunk in chunks] == [
        0,
        1,
        0,
    ]


def test_without_being_asked_nothing_is_told(client: httpx2.Client):
    assert ask(client, CHAT, chat())["choices"][0]["logprobs"] is None
    assert ask(client, CHAT, chat(logprobs=False))["choices"][0]["logprobs"] is None
    assert ask(client, COMPLETIONS, complete())["choices"][0]["logprobs"] is None


def split_character() -> tuple[int, int]:
    """Two tokens that make one character together, none of them alone."""
    for token_id in range(tokenizer().vocab_size):
        data = tokenizer().token_bytes(token_id)
        if data == b"\xe2":
            return token_id, next(
                i for i in range(tokenizer().vocab_size) if tokenizer().token_bytes(i) == b"\x82"
            )
    raise AssertionError("no byte tokens")


def test_a_token_that_is_no_character_is_told_by_its_bytes(client: httpx2.Client, backend: StubBackend):
    ids = split_character()

    async def halves(generation: Generation) -> AsyncGenerator[Event, None]:
        yield TextTokens("", (*ids, 14), Usage(1, 3), logprobs=tuple(number(i, 0) for i in (*ids, 14)))
        yield Ended("length", Usage(1, 3))

    backend.script = halves
    content = ask(client, CHAT, chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content[:2]] == [
        ("\\xe2", [0xE2]),
        ("\\x82", [0x82]),
    ]
    told = ask(client, COMPLETIONS, complete(logprobs=0))["choices"][0]["logprobs"]
    assert told["tokens"][:2] == ["bytes:\\xe2", "bytes:\\x82"]


# Log-probabilities of completions, and the echo


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_a_completion_tells_of_each_token_in_four_lists(client: httpx2.Client, num_top: int):
    told = ask(client, COMPLETIONS, complete(logprobs=num_top))["choices"][0]["logprobs"]
    assert told["tokens"] == [text(i) for i in IDS]
    assert told["token_logprobs"] == [-i / 8 for i in IDS]
    assert told["text_offset"] == [len(tokenizer().decode(IDS[:i])) for i in range(5)]
    for tops, token_id in zip(told["top_logprobs"], IDS, strict=True):
        expected = {text(i): logprob for i, logprob in number(token_id, num_top).top}
        assert tops == {text(token_id): -token_id / 8, **expected}


def test_the_offsets_of_a_stream_run_on(client: httpx2.Client):
    body = complete(logprobs=1, echo=True)
    whole = ask(client, COMPLETIONS, body)["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in stream(client, COMPLETIONS, body)]
    assert [part and len(part["tokens"]) for part in parts] == [3, 3, 2, None]
    for name, values in whole.items():
        assert [value for part in parts[:-1] for value in part[name]] == values


def test_special_tokens_take_no_place_in_an_answers_text(client: httpx2.Client, backend: StubBackend):
    special = min(tokenizer().special_ids)

    async def said(generation: Generation) -> AsyncGenerator[Event, None]:
        numbers = tuple(number(token, 0) for token in (40, special, 41))
        yield TextTokens(tokenizer().decode([40, 41]), (40, special, 41), Usage(3, 3), logprobs=numbers)
        yield Ended("length", Usage(3, 3))

    backend.script = said
    told = ask(client, COMPLETIONS, complete(logprobs=0))["choices"][0]["logprobs"]
    width = len(text(40))
    assert told["text_offset"] == [0, width, width]


def test_logprobs_may_be_said_to_be_false(client: httpx2.Client):
    assert ask(client, COMPLETIONS, complete(logprobs=False))["choices"][0]["logprobs"] is None


def test_an_echo_begins_with_the_prompt_and_its_numbers(client: httpx2.Client, backend: StubBackend):
    choice = ask(client, COMPLETIONS, complete(echo=True, logprobs=1))["choices"][0]
    prompt = tokenizer().decode([40, 41, 42])
    assert choice["text"] == prompt + "Hello, world"
    told = choice["logprobs"]
    assert told["tokens"] == [text(i) for i in (40, 41, 42, *IDS)]
    assert told["token_logprobs"] == [None, *(-i / 8 for i in (41, 42, *IDS))]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"][3] == len(prompt)
    assert backend.last.wants_prompt_logprobs


def test_an_echoed_text_is_the_text_that_was_sent(client: httpx2.Client, backend: StubBackend):
    body = complete(prompt="Tell me  <|im_end|> more\n", echo=True)
    assert ask(client, COMPLETIONS, body)["choices"][0]["text"] == "Tell me  <|im_end|> more\nHello, world"
    assert not backend.last.wants_prompt_logprobs
    texts = [chunk["choices"][0]["text"] for chunk in stream(client, COMPLETIONS, body)]
    assert texts == ["Tell me  <|im_end|> more\n", "Hello", ", world", ""]


def test_an_echo_may_be_all_that_is_asked_for(client: httpx2.Client, backend: StubBackend):
    async def nothing(generation: Generation) -> AsyncGenerator[Event, None]:
        before = tuple(number(i, 1) for i in generation.prompt_ids[1:])
        yield TextTokens("", (), Usage(3), prompt_logprobs=before)
        yield Ended("length", Usage(3))

    backend.script = nothing
    body = complete(echo=True, logprobs=1, max_tokens=0)
    answer = ask(client, COMPLETIONS, body)
    assert backend.last.max_tokens == 0
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -41 / 8, -42 / 8]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = stream(client, COMPLETIONS, body)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) == 3


# Several choices


def test_every_choice_comes_with_its_index_and_the_usage_sums_up(client: httpx2.Client, backend: StubBackend):
    answer = ask(client, CHAT, chat(n=3, logprobs=True, return_token_ids=True))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hello, world"}
    assert all(len(choice["logprobs"]["content"]) == 5 for choice in answer["choices"])
    usage, prompt = answer["usage"], len(backend.last.prompt_ids)
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == 15
    assert usage["total_tokens"] == prompt + 15
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 9
    assert answer["dflash"]["rounds"] == 6
    assert answer["dflash"]["mean_accept"] == 1.5


def test_streamed_choices_open_speak_and_end_each_for_itself(client: httpx2.Client):
    chunks = stream(client, CHAT, chat(n=2, stream_options={"include_usage": True}))
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 10
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 0, 1, 1, 0, 0, 1, 1]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("content") for choice in own[1:]] == ["Hello", ", world", None]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]
    ends = [chunk["dflash"]["rounds"] for chunk in chunks if "dflash" in chunk]
    assert ends == [2, 2]


def test_each_choice_of_a_completion_has_the_echo_and_the_prompt_ids(client: httpx2.Client):
    body = complete(n=2, echo=True, logprobs=0, return_token_ids=True)
    choices = ask(client, COMPLETIONS, body)["choices"]
    assert all(choice["prompt_token_ids"] == [40, 41, 42] for choice in choices)
    assert choices[0]["text"] == choices[1]["text"]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    streamed = [chunk["choices"][0] for chunk in stream(client, COMPLETIONS, body)]
    for index in (0, 1):
        own = [choice for choice in streamed if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == choices[index]["text"]
        assert ["prompt_token_ids" in choice for choice in own] == [True, False, False, False]


def test_the_official_client_reads_all_of_it(served: tuple[StubBackend, httpx2.Client]):
    url = str(served[1].base_url)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        answer = official.chat.completions.create(
            model="stub-model",
            messages=[{"role": "user", "content": "Hi"}],
            n=2,
            logprobs=True,
            top_logprobs=2,
            logit_bias={"5": -100},
            presence_penalty=0.5,
        )
        told = answer.choices[1].logprobs
        assert told is not None
        assert told.content is not None
        assert [entry.logprob for entry in told.content] == [-i / 8 for i in IDS]
        assert told.content[0].top_logprobs[0].token == text(12)
        completion = official.completions.create(model="stub-model", prompt="Hi", logprobs=1, echo=True)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.tokens[-5:] == [text(i) for i in IDS]
