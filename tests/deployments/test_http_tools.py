"""Tool calls and thoughts through the official client, streamed and not."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import tokenizers

import dflash_core.pair
from deployments.generation import Ended, Event, Generation, TextTokens, Usage
from deployments.openai.limits import Limits
from dflash_core.events import TokenLogprobs
from dflash_core.text.template import ChatTemplate
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.http_stub import StubBackend, chat, events, say, serving, tokenizer

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, openai.OpenAI]]:
    backend = StubBackend()
    with (
        serving(backend) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield backend, client


@pytest.fixture
def backend(served: tuple[StubBackend, openai.OpenAI]) -> StubBackend:
    return served[0]


@pytest.fixture
def client(served: tuple[StubBackend, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return client.chat.completions.create(**body)


def functions(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


WEATHER = ("weather", {"city": "Zürich", "days": 3})


def test_a_call_is_told_apart_from_the_text_before_it(client: openai.OpenAI, backend: StubBackend):
    say(backend, "Let me see.\n" + CALL)
    choice = ask(client, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert functions(choice.message.tool_calls) == [WEATHER]
    assert choice.message.tool_calls[0].type == "function"
    assert "Zürich" in choice.message.tool_calls[0].function.arguments


def test_parallel_calls_have_ids_and_no_content(client: openai.OpenAI, backend: StubBackend):
    say(backend, CALL + "\n" + CALL)
    message = ask(client, tools=[TOOL]).choices[0].message
    assert message.content is None
    assert functions(message.tool_calls) == [WEATHER, WEATHER]
    assert len({call.id for call in message.tool_calls}) == 2
    only = ask(client, tools=[TOOL], parallel_tool_calls=False).choices[0].message
    assert functions(only.tool_calls) == [WEATHER]


def test_streamed_calls_come_as_deltas_in_order(client: openai.OpenAI, backend: StubBackend):
    say(backend, "Let me see.\n" + CALL + "\n" + CALL)
    chunks = list(ask(client, tools=[TOOL], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert functions(calls) == [WEATHER, WEATHER]
    assert len({call.id for call in calls}) == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "tool_calls"
    ]


def test_the_clients_own_accumulator_understands_a_streamed_call(client: openai.OpenAI, backend: StubBackend):
    say(backend, CALL)
    messages: Any = [{"role": "user", "content": "Hi"}]
    with client.chat.completions.stream(model="stub-model", messages=messages, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert functions(final.choices[0].message.tool_calls) == [WEATHER]


def test_no_character_of_a_malformed_call_is_lost(client: openai.OpenAI, backend: StubBackend):
    text = "So: <tool_call>\n{weather}\n</tool_call>"
    say(backend, text)
    choice = ask(client, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    chunks = list(ask(client, tools=[TOOL], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_cut_inside_a_call_ends_by_length_with_its_text(
    client: openai.OpenAI, backend: StubBackend
):
    say(backend, CALL[:40], reason="length")
    choice = ask(client, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL[:40], "length")


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_such_text_is_content(client: openai.OpenAI, backend: StubBackend, fields: Any):
    say(backend, CALL)
    choice = ask(client, **fields).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize(
    ("choice", "param", "code"),
    [
        ({"type": "function", "function": {"name": "clock"}}, "tool_choice", "invalid_value"),
        ("sometimes", "tool_choice", "invalid_value"),
        ({"type": "function"}, "tool_choice.function", "missing_required_parameter"),
        ({"type": "custom"}, "tool_choice.type", "invalid_value"),
        (3, "tool_choice", "invalid_value"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(client: openai.OpenAI, choice: Any, param: str, code: str):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[TOOL], tool_choice=choice)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_tools_for_a_model_without_calls_are_refused(
    client: openai.OpenAI, backend: StubBackend, monkeypatch: pytest.MonkeyPatch
):
    class Plain:
        chat_template = "{{ content }}"

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer(), name)

    monkeypatch.setattr(backend, "tokenizer", Plain())
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[TOOL])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


def test_a_call_and_its_result_go_back_through_the_template(client: openai.OpenAI, backend: StubBackend):
    say(backend, CALL)
    message = ask(client, tools=[TOOL]).choices[0].message
    history = [
        {"role": "user", "content": "Hi"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    say(backend, "It is sunny.")
    answer = ask(client, messages=history, tools=[TOOL]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is sunny.", "stop")
    prompt = tokenizer().decode(backend.last.prompt_ids, skip_special=False)
    assert CALL in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_thoughts_are_told_apart(client: openai.OpenAI, backend: StubBackend):
    say(backend, "<think>\nThe user greets.\n</think>\n\nHello.")
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello.", "The user greets.")
    deltas = [chunk.choices[0].delta.model_dump() for chunk in ask(client, stream=True)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "The user greets."
    assert "".join(delta["content"] or "" for delta in deltas) == "Hello."


def test_an_answer_cut_inside_its_thoughts_has_no_content(client: openai.OpenAI, backend: StubBackend):
    say(backend, "<think>\nThe user ", reason="length")
    choice = ask(client).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == (None, "The user")
    assert choice.finish_reason == "length"


def test_token_ids_and_usage_come_with_text_that_is_held_back(client: openai.OpenAI, backend: StubBackend):
    say(backend, CALL)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        ask(
            client,
            tools=[TOOL],
            stream=True,
            stream_options=options,
            extra_body={"return_token_ids": True},
        )
    )
    ids = [i for chunk in chunks if chunk.choices for i in chunk.choices[0].model_extra["token_ids"]]
    assert ids == [11, 12] * (-(-len(CALL) // 7))
    assert chunks[-1].usage.completion_tokens == len(ids)


def test_a_completion_is_text_whatever_it_holds(client: openai.OpenAI, backend: StubBackend):
    say(backend, "<think>a</think>" + CALL)
    answer = client.completions.create(model="stub-model", prompt="Once")
    assert answer.choices[0].text == "<think>a</think>" + CALL


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def thinker(backend: StubBackend, monkeypatch: pytest.MonkeyPatch) -> StubBackend:
    """A model whose template begins the thoughts, unless it is told not to."""
    file = Path(dflash_core.pair.__file__).parent / "target" / "tokenizer.json"
    template = ChatTemplate({"default": THINKING}, {})
    own = Tokenizer(tokenizers.Tokenizer.from_file(str(file)), template, tokenizer().eos_token_ids)
    monkeypatch.setattr(backend, "tokenizer", own)
    return backend


def test_thoughts_that_the_prompt_began_are_told_apart(client: openai.OpenAI, thinker: StubBackend):
    say(thinker, "Hm.\n</think>\n\nHello.")
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello.", "Hm.")
    deltas = [chunk.choices[0].delta.model_dump() for chunk in ask(client, stream=True)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert "".join(delta["content"] or "" for delta in deltas) == "Hello."


@pytest.mark.parametrize(
    ("body", "is_thinking"),
    [
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, True),
    ],
)
def test_thinking_can_be_switched_off(
    client: openai.OpenAI, thinker: StubBackend, body: dict[str, Any], is_thinking: bool
):
    say(thinker, "Hello.")
    message = ask(client, extra_body=body).choices[0].message
    assert message.content == (None if is_thinking else "Hello.")
    assert getattr(message, "reasoning_content", None) == ("Hello." if is_thinking else None)
    prompt = thinker.tokenizer.decode(thinker.last.prompt_ids)
    assert prompt.endswith("<think>\n" if is_thinking else "</think>\n\n")


def test_a_system_prompt_that_speaks_of_thoughts_begins_none(client: openai.OpenAI, backend: StubBackend):
    say(backend, "Hello.")
    messages = [{"role": "system", "content": "Use <think>"}, {"role": "user", "content": "Hi"}]
    assert ask(client, messages=messages).choices[0].message.content == "Hello."


def test_a_long_call_keeps_the_connection_alive(backend: StubBackend):
    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        for character in CALL:
            yield TextTokens(character, (11,), Usage(1, 1))
            await asyncio.sleep(0.003)
        yield Ended("stop", Usage(1, 1))

    backend.script = script
    with serving(backend, limits=Limits(keepalive_s=0.05)) as url:
        body = chat(tools=[TOOL], stream=True)
        blocks = events(httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=10))
    is_comment = [block.startswith(":") for block in blocks]
    assert is_comment.count(True) >= 2
    assert is_comment.count(False) == 4  # the role, the call, the end, [DONE]


def test_choices_that_stream_together_keep_their_calls_apart(client: openai.OpenAI, backend: StubBackend):
    texts = ("Let me see.\n" + CALL, "<think>Hm.</think>No call: <tool_call>")

    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        for start in range(0, max(map(len, texts)), 7):
            for index, text in enumerate(texts):
                if text[start : start + 7]:
                    yield TextTokens(text[start : start + 7], (11,), Usage(1, 1), index=index)
        for index in range(2):
            yield Ended("stop", Usage(1, 1), index=index)

    backend.script = script
    one, two = ask(client, n=2, tools=[TOOL]).choices
    assert (one.message.content, one.finish_reason) == ("Let me see.", "tool_calls")
    assert functions(one.message.tool_calls) == [WEATHER]
    assert (two.message.content, two.finish_reason) == ("No call: <tool_call>", "stop")
    assert two.message.reasoning_content == "Hm."
    streamed = [chunk.choices[0] for chunk in ask(client, n=2, tools=[TOOL], stream=True)]
    contents = ["".join(c.delta.content or "" for c in streamed if c.index == index) for index in range(2)]
    assert contents == ["Let me see.", "No call: <tool_call>"]
    reasons = {c.index: c.finish_reason for c in streamed if c.finish_reason}
    assert reasons == {0: "tool_calls", 1: "stop"}


def test_every_token_of_a_call_has_its_number(client: openai.OpenAI, backend: StubBackend):
    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        for character in CALL:
            yield TextTokens(character, (11,), Usage(1, 1), logprobs=(TokenLogprobs(-0.5, ()),))
        yield Ended("stop", Usage(1, 1))

    backend.script = script
    choice = ask(client, tools=[TOOL], logprobs=True).choices[0]
    assert functions(choice.message.tool_calls) == [WEATHER]
    assert len(choice.logprobs.content) == len(CALL)
    chunks = list(ask(client, tools=[TOOL], logprobs=True, stream=True))
    told = [
        number
        for chunk in chunks
        if chunk.choices[0].logprobs
        for number in chunk.choices[0].logprobs.content
    ]
    assert len(told) == len(CALL)
