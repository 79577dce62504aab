"""Any body at all gets an answer of ours: never 422, never 500."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployments.openai.limits import Limits
from tests.deployments.http_stub import StubBackend, serving

MAX_BODY = 20_000
EXPECTED = {200, 400, 404, 413}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with (
        serving(StubBackend(), limits=Limits(max_body_bytes=MAX_BODY)) as url,
        httpx2.Client(base_url=url, timeout=10) as client,
    ):
        yield client


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["user", "text", "auto", "none", "function", "stub-model", "{}", "<|im_end|>", "\ud800"]
    )
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)

parts = st.fixed_dictionaries({"type": st.just("text") | anything, "text": st.text(max_size=20) | anything})
calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text(), "arguments": anything}),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | anything},
    optional={
        "content": st.text(max_size=50) | st.lists(parts, max_size=3) | anything,
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "name": anything,
    },
)
tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text(max_size=5), "parameters": anything}),
    }
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | anything,
        "role": st.sampled_from(["system", "user", "assistant"]) | anything,
        "call_id": st.text(max_size=5) | anything,
        "name": st.text(max_size=5) | anything,
        **{
            name: st.text(max_size=9) | st.lists(parts, max_size=2) | anything
            for name in ("content", "output")
        },
        **dict.fromkeys(("arguments", "summary", "id"), anything),
    },
)
formats = st.fixed_dictionaries(
    {"type": st.just("json_schema")},
    optional={"json_schema": st.fixed_dictionaries({"name": st.just("a")}, optional={"schema": anything})},
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "input": st.text(max_size=20) | st.lists(items, max_size=4) | anything,
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": anything}) | anything})
    | anything,
    "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low"]) | anything}) | anything,
    "include": st.lists(st.just("message.output_text.logprobs") | anything, max_size=2) | anything,
    "messages": st.lists(messages, max_size=4) | anything,
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 9000), max_size=5) | anything,
    "tools": st.lists(tools, max_size=2) | anything,
    "stop": st.lists(st.text(max_size=3), max_size=18) | anything,
    "stop_token_ids": st.lists(st.integers(-1, 9000), max_size=4) | anything,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans() | anything}) | anything,
    "response_format": formats | anything,
    "structured_outputs": st.fixed_dictionaries({"json": anything}) | anything,
    "guided_regex": st.text(max_size=5) | anything,
    "guided_grammar": st.text(max_size=20) | anything,
    "tool_choice": st.just("required") | anything,
    "chat_template_kwargs": st.dictionaries(st.text(max_size=5), anything, max_size=3),
} | {
    name: st.integers(-2, 400) | st.floats(-1, 3) | anything
    for name in (
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("logprobs", "logit_bias", "echo", "presence_penalty"),
        *("ignore_eos", "return_token_ids", "best_of", "user", "unknown"),
        *("top_logprobs", "frequency_penalty", "repetition_penalty", "min_tokens"),
        *("max_output_tokens", "instructions", "previous_response_id", "background", "truncation", "store"),
    )
}
bodies = st.fixed_dictionaries({"model": st.just("stub-model") | anything}, optional=fields)
paths = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses"])


def assert_answered(client: httpx2.Client, path: str, body: bytes) -> int:
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in EXPECTED, (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert "Traceback" not in error["message"]
    return response.status_code


relaxed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@relaxed
@given(path=paths, body=bodies)
@example(
    path="/v1/chat/completions",
    body={"model": "stub-model", "messages": [{"role": "tool", "content": "a", "tool_calls": []}]},
)
def test_any_json_object_is_answered(client: httpx2.Client, path: str, body: dict[str, Any]):
    assert_answered(client, path, json.dumps(body).encode())


@relaxed
@given(path=paths, body=st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_answered(client: httpx2.Client, path: str, body: bytes):
    assert assert_answered(client, path, body) == 400


@relaxed
@given(path=paths, size=st.integers(MAX_BODY + 1, 3 * MAX_BODY))
def test_any_large_body_is_refused(client: httpx2.Client, path: str, size: int):
    assert assert_answered(client, path, b" " * size) == 413


@relaxed
@given(path=paths, value=anything, name=st.sampled_from(["temperature", "max_tokens", "seed", "stop", "n"]))
def test_a_good_request_with_one_odd_field_is_answered(
    client: httpx2.Client, path: str, value: Any, name: str
):
    good = {
        "model": "stub-model",
        "prompt": "Hi",
        "input": "Hi",
        "messages": [{"role": "user", "content": "Hi"}],
    }
    assert_answered(client, path, json.dumps(good | {name: value}).encode())
