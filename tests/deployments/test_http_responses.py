"""``/v1/responses`` through the official client, streamed and not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from deployments.generation import TextTokens, Usage
from dflash_core.errors import RowFailed
from tests.deployments.http_stub import StubBackend, failing, say, serving, tokenizer, two_rounds

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Say the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"


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
    served[0].script = two_rounds
    return served[0]


@pytest.fixture
def client(served: tuple[StubBackend, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def ask(client: openai.OpenAI, input_: Any = "Hi", **fields: Any) -> Any:
    return client.responses.create(model="stub-model", input=input_, **fields)


def prompt(backend: StubBackend) -> str:
    return tokenizer().decode(backend.last.prompt_ids, skip_special=False)


def test_a_response_answers_with_text_usage_and_what_applied(client: openai.OpenAI, backend: StubBackend):
    answer = ask(client, instructions="Be short.", temperature=0.5, max_output_tokens=9)
    assert answer.output_text == "Hello, world"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "stub-model")
    assert answer.id.startswith("resp_")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.95, 9)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(backend.last.prompt_ids), 5)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    assert backend.last.max_tokens == 9
    assert backend.last.id == answer.id
    assert prompt(backend).startswith("<|im_start|>system\nBe short.<|im_end|>")
    assert answer.model_extra["dflash"]["accepted"] == 3


def test_a_stream_tells_each_event_in_its_order(client: openai.OpenAI, backend: StubBackend):
    events = list(ask(client, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {type(event).__name__ for event in events} >= {"ResponseTextDeltaEvent", "ResponseCompletedEvent"}
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello, world"
    ids = {e.item_id for e in events if hasattr(e, "item_id")}
    assert ids == {events[-1].response.output[0].id}
    assert events[-1].response.output_text == "Hello, world"


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_words_and_calls_are_items_in_their_order(
    client: openai.OpenAI, backend: StubBackend, is_stream: bool
):
    say(backend, f"<think>\nLet me look.\n</think>\n\nOne moment.\n{CALL}\n{CALL}")
    if is_stream:
        with client.responses.stream(model="stub-model", input="Hi", tools=[TOOL]) as stream:
            events = list(stream)
            answer: Any = stream.get_final_response()
        arguments = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert [json.loads(event.arguments) for event in arguments] == [{"city": "Zürich"}] * 2
        assert [event.output_index for event in arguments] == [2, 3]
        thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(thoughts) == "Let me look."
    else:
        answer = ask(client, tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "Let me look."
    assert answer.output_text == "One moment."
    assert {(call.name, call.status) for call in answer.output[2:]} == {("weather", "completed")}
    assert len({call.call_id for call in answer.output[2:]}) == 2
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_an_answers_items_and_a_calls_output_go_back_as_one_chat(client: openai.OpenAI, backend: StubBackend):
    say(backend, f"One moment.\n{CALL}")
    first = ask(client, tools=[TOOL])
    say(backend, "It is sunny.")
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    history += first.output
    history.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"})
    answer = ask(client, history, tools=[TOOL], instructions="Be short.")
    assert answer.output_text == "It is sunny."
    text = prompt(backend)
    assert "Be short.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>" in text
    assert f"<|im_start|>assistant\nOne moment.{CALL}<|im_end|>" in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_an_answer_cut_by_its_budget_is_incomplete(client: openai.OpenAI, backend: StubBackend):
    say(backend, "Once upon a time", reason="length")
    answer = ask(client)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert [event.type for event in ask(client, stream=True)][-1] == "response.incomplete"


def test_a_stream_that_breaks_off_ends_with_a_failed_response(client: openai.OpenAI, backend: StubBackend):
    backend.script = failing(RowFailed("non-finite logits"), TextTokens("He", (1,), Usage(3, 1)))
    last = list(ask(client, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "non-finite logits"
    with pytest.raises(openai.InternalServerError):
        ask(client)


def test_log_probabilities_come_with_the_text_when_included(client: openai.OpenAI, backend: StubBackend):
    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer.output[0].content[0]
    assert [number.logprob for number in part.logprobs] == [-i / 8 for i in (11, 12, 13, 14, 15)]
    assert len(part.logprobs[0].top_logprobs) == 2
    assert ask(client).output[0].content[0].logprobs == []


def test_a_form_of_the_text_and_a_forced_call_are_a_chats(client: openai.OpenAI, backend: StubBackend):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answer = ask(client, text={"format": format_})
    in_a_chat = {"name": "answer", "schema": schema, "strict": True}
    said: Any = [{"role": "user", "content": "Hi"}]
    wanted: Any = {"type": "json_schema", "json_schema": in_a_chat}
    grammar = backend.last.grammar
    client.chat.completions.create(model="stub-model", messages=said, response_format=wanted)
    assert grammar
    assert grammar == backend.last.grammar
    assert answer.text.format.name == "answer"
    ask(client, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert "weather" in (backend.last.grammar or "")
    ask(client, extra_body={"guided_regex": "[ab]+"})
    assert backend.last.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input_": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input_": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input_": []}, "input"),
        ({"input_": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, None),
    ],
)
def test_what_cannot_be_kept_is_refused_in_the_requests_own_words(
    client: openai.OpenAI, backend: StubBackend, fields: Any, param: str | None
):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert (caught.value.param or "").startswith(param or "input[0].")
    assert "'messages" not in caught.value.message
    assert "'response_format" not in caught.value.message


def test_a_format_is_followed(client: openai.OpenAI, backend: StubBackend):
    schema = {"type": "object", "properties": {"ship": {"type": "string"}}}
    ask(client, text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert '"ship"' in (backend.last.grammar or "")
    assert '"additionalProperties": false' in (backend.last.grammar or "")


def test_nothing_is_stored_and_that_is_said(client: openai.OpenAI, backend: StubBackend):
    raw = client.responses.with_raw_response.create(model="stub-model", input="Hi", store=True)
    answer: Any = raw.parse()
    assert answer.model_extra["store"] is False
    assert raw.headers["x-dflash-ignored"] == "store"
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")


def test_each_frame_is_named_after_its_type(served: tuple[StubBackend, openai.OpenAI], backend: StubBackend):
    url = f"{served[1].base_url}responses"
    body = {"model": "stub-model", "input": "Hi", "stream": True}
    blocks = httpx2.post(url, json=body).text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
