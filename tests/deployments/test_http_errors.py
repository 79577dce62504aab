"""What clients send wrong, and what they get: a status, a field and a code, never more."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx2
import pytest
from starlette.types import Message

from deployments.http import create_app
from deployments.openai.limits import Limits
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.http_stub import (
    CONTEXT,
    StubBackend,
    chat,
    failing,
    serving,
    tokenizer,
    two_rounds,
)

MAX_BODY = 200_000


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, httpx2.Client]]:
    backend = StubBackend()
    with (
        serving(backend, limits=Limits(max_body_bytes=MAX_BODY)) as url,
        httpx2.Client(base_url=url, timeout=10) as client,
    ):
        yield backend, client


@pytest.fixture
def backend(served: tuple[StubBackend, httpx2.Client]) -> StubBackend:
    served[0].script = two_rounds
    served[0].generations.clear()
    return served[0]


@pytest.fixture
def client(served: tuple[StubBackend, httpx2.Client], backend: StubBackend) -> httpx2.Client:
    return served[1]


def complete(**fields: object) -> dict[str, object]:
    return {"model": "stub-model", "prompt": "Once", **fields}


def said(content: object, **fields: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": content, **fields}])


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
INVALID, MISSING, UNSUPPORTED = "invalid_value", "missing_required_parameter", "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
TOOL_CALL = {"type": "function", "function": {"name": "f", "arguments": "[1]"}}

WRONG = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, "model", MISSING),
    (CHAT, {"model": "stub-model"}, "messages", MISSING),
    (CHAT, chat(model=3), "model", INVALID),
    (CHAT, chat(model=""), "model", INVALID),
    (CHAT, chat(messages=[]), "messages", INVALID),
    (CHAT, chat(messages="Hi"), "messages", INVALID),
    (CHAT, chat(messages=["Hi"]), "messages[0]", INVALID),
    (CHAT, said(4), "messages[0].content", INVALID),
    (CHAT, said(None), "messages[0].content", MISSING),
    (CHAT, said([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", INVALID),
    (CHAT, said([{"type": "text"}]), "messages[0].content[0].text", MISSING),
    (CHAT, chat(messages=[{"role": "wizard", "content": "Hi"}]), "messages[0].role", INVALID),
    (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [TOOL_CALL]}]),
     "messages[0].tool_calls[0].function.arguments", INVALID),
    (CHAT, chat(max_tokens=0), "max_tokens", INVALID),
    (CHAT, chat(max_tokens=-1), "max_tokens", INVALID),
    (CHAT, chat(max_tokens=True), "max_tokens", INVALID),
    (CHAT, chat(max_tokens=1.5), "max_tokens", INVALID),
    (CHAT, chat(max_tokens="7"), "max_tokens", INVALID),
    (CHAT, chat(max_tokens=10**30), "max_tokens", INVALID),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", INVALID),
    (CHAT, chat(max_tokens=CONTEXT), "max_tokens", TOO_LONG),
    (CHAT, chat(max_tokens=1, max_completion_tokens=CONTEXT), "max_completion_tokens", TOO_LONG),
    (CHAT, said("word " * 2 * CONTEXT), "messages", TOO_LONG),
    (COMPLETIONS, complete(prompt=[5] * CONTEXT), "prompt", TOO_LONG),
    (CHAT, chat(temperature=-0.1), "temperature", INVALID),
    (CHAT, chat(temperature=2.1), "temperature", INVALID),
    (CHAT, chat(temperature=False), "temperature", INVALID),
    (CHAT, chat(top_p=1.01), "top_p", INVALID),
    (CHAT, chat(top_k=-2), "top_k", INVALID),
    (CHAT, chat(top_k=True), "top_k", INVALID),
    (CHAT, chat(min_p=-1), "min_p", INVALID),
    (CHAT, chat(seed=2**64), "seed", INVALID),
    (CHAT, chat(seed=-(2**63) - 1), "seed", INVALID),
    (CHAT, chat(seed=1.0), "seed", INVALID),
    (CHAT, chat(stop=""), "stop", INVALID),
    (CHAT, chat(stop=["a", ""]), "stop[1]", INVALID),
    (CHAT, chat(stop=["a"] * 17), "stop", INVALID),
    (CHAT, chat(stop=1), "stop", INVALID),
    (CHAT, chat(stop_token_ids=[1, -1]), "stop_token_ids[1]", INVALID),
    (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids[0]", INVALID),
    (CHAT, chat(stop_token_ids=[True]), "stop_token_ids[0]", INVALID),
    (CHAT, chat(stream="yes"), "stream", INVALID),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", INVALID),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", INVALID),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "invalid_request"),
    (CHAT, chat(tools=[{"type": "retrieval"}]), "tools[0].type", INVALID),
    (COMPLETIONS, {"model": "stub-model"}, "prompt", MISSING),
    (COMPLETIONS, complete(prompt=""), "prompt", INVALID),
    (COMPLETIONS, complete(prompt=[]), "prompt", INVALID),
    (COMPLETIONS, complete(prompt=[1, True]), "prompt[1]", INVALID),
    (COMPLETIONS, complete(prompt=[1, 10**6]), "prompt[1]", INVALID),
    (COMPLETIONS, complete(prompt=["a", "b"]), "prompt", UNSUPPORTED),
    (COMPLETIONS, complete(prompt={"text": "a"}), "prompt", INVALID),
    (CHAT, chat(n=True), "n", INVALID),
    (CHAT, chat(n=0), "n", INVALID),
    (CHAT, chat(n=17), "n", INVALID),
    (CHAT, chat(n=129), "n", INVALID),
    (CHAT, chat(best_of=2), "best_of", UNSUPPORTED),
    (COMPLETIONS, complete(n=2, best_of=2), "best_of", UNSUPPORTED),
    (CHAT, chat(logprobs=5), "logprobs", INVALID),
    (CHAT, chat(top_logprobs=2), "top_logprobs", INVALID),
    (CHAT, chat(logprobs=False, top_logprobs=2), "top_logprobs", INVALID),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", INVALID),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs", INVALID),
    (COMPLETIONS, complete(logprobs=True), "logprobs", INVALID),
    (COMPLETIONS, complete(logprobs=21), "logprobs", INVALID),
    (COMPLETIONS, complete(top_logprobs=2), "top_logprobs", UNSUPPORTED),
    (COMPLETIONS, complete(echo=1), "echo", INVALID),
    (CHAT, chat(echo=True), "echo", UNSUPPORTED),
    (COMPLETIONS, complete(max_tokens=0), "max_tokens", INVALID),
    (COMPLETIONS, complete(max_tokens=0, echo=False), "max_tokens", INVALID),
    (CHAT, chat(max_tokens=0), "max_tokens", INVALID),
    (COMPLETIONS, complete(echo=True, prompt=[1] * CONTEXT, max_tokens=0), "prompt", TOO_LONG),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5", INVALID),
    (CHAT, chat(logit_bias={"5": "1"}), "logit_bias.5", INVALID),
    (CHAT, chat(logit_bias={"five": 1}), "logit_bias", INVALID),
    (CHAT, chat(logit_bias={"-5": 1}), "logit_bias", INVALID),
    (CHAT, chat(logit_bias={"9" * 30: 1}), "logit_bias", INVALID),
    (CHAT, chat(logit_bias={"8192": 1}), "logit_bias", INVALID),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", INVALID),
    (CHAT, chat(logit_bias=[5]), "logit_bias", INVALID),
    (CHAT, chat(presence_penalty=2.5), "presence_penalty", INVALID),
    (CHAT, chat(frequency_penalty=-2.5), "frequency_penalty", INVALID),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", INVALID),
    (CHAT, chat(repetition_penalty=101), "repetition_penalty", INVALID),
    (CHAT, chat(min_tokens=-1), "min_tokens", INVALID),
    (CHAT, chat(min_tokens=5, max_tokens=4), "min_tokens", INVALID),
    (COMPLETIONS, complete(suffix="end"), "suffix", UNSUPPORTED),
    (COMPLETIONS, complete(best_of=2), "best_of", UNSUPPORTED),
    (CHAT, chat(response_format={"type": "yaml"}), "response_format", INVALID),
    (CHAT, chat(tool_choice="required"), "tool_choice", INVALID),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "code"), WRONG)
def test_a_wrong_field_is_named(client: httpx2.Client, backend: StubBackend, path, body, param, code):
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert backend.generations == []


def test_a_picture_is_told_that_this_model_reads_text(client: httpx2.Client):
    response = client.post(CHAT, json=said([{"type": "image_url", "image_url": {"url": "x"}}]))
    assert "this model reads text" in response.json()["error"]["message"]


RIGHT = [
    (CHAT, chat(n=1, logprobs=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, n_=None)),
    (CHAT, chat(response_format={"type": "text"}, tool_choice="auto", user="me", metadata={"a": "b"})),
    (CHAT, chat(max_tokens=None, temperature=None, stop=None, seed=None, stream=None, tools=None)),
    (CHAT, chat(temperature=0, top_p=0, top_k=-1, min_p=1, seed=-(2**63))),
    (CHAT, said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    (CHAT, chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi"}])),
    (COMPLETIONS, complete(prompt=["one"])),
    (COMPLETIONS, complete(prompt=[[1, 2]], best_of=1, echo=False, suffix=None)),
    (COMPLETIONS, complete(prompt=[[1, 2]], echo=True, max_tokens=0, logprobs=20)),
    (CHAT, chat(n=16, logprobs=True, top_logprobs=20, min_tokens=4, max_tokens=4)),
    (CHAT, chat(logprobs=False, top_logprobs=0, logit_bias={"0": -100, "8191": 100, "07": 1})),
    (CHAT, chat(presence_penalty=-2, frequency_penalty=2, repetition_penalty=100)),
]


@pytest.mark.parametrize(("path", "body"), RIGHT)
def test_values_that_ask_for_nothing_unusual_are_accepted(client: httpx2.Client, path, body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text


BROKEN = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b'{"model": NaN}',
    b'{"model": "stub-model", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "stub-model", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "stub-model", "prompt": "a", "temperature": 1e999}',
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_broken_body_is_a_bad_request(client: httpx2.Client, backend: StubBackend, path: str, body: bytes):
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert backend.generations == []


def test_nan_is_refused_wherever_it_stands(client: httpx2.Client):
    body = b'{"model": "stub-model", "prompt": "a", "metadata": {"x": NaN}}'
    response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_only_json_is_read(client: httpx2.Client, content_type: str):
    body = httpx2.Request("POST", "http://x", json=chat()).content
    response = client.post(CHAT, content=body, headers={"content-type": content_type})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_content_type")
    for good in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert client.post(CHAT, content=body, headers={"content-type": good}).status_code == 200


def test_a_body_announced_too_large_is_refused_unread(client: httpx2.Client):
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=5) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 10000000000\r\n\r\n{"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_grows_too_large_is_refused(client: httpx2.Client, backend: StubBackend):
    chunks = (b" " * 10_000 for _ in range(100))
    response = client.post(CHAT, content=chunks, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert backend.generations == []


async def test_no_more_of_a_body_is_taken_than_the_limit(backend: StubBackend):
    app = create_app(backend, limits=Limits(max_body_bytes=MAX_BODY))
    taken = 0
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal taken
        taken += 10_000
        return {"type": "http.request", "body": b" " * 10_000, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert sent[0]["status"] == 413
    assert taken == MAX_BODY + 10_000


def test_a_body_just_within_the_limit_is_read(client: httpx2.Client):
    body = httpx2.Request("POST", "http://x", json=chat()).content
    padded = body + b" " * (MAX_BODY - len(body))
    headers = {"content-type": "application/json"}
    assert client.post(CHAT, content=padded, headers=headers).status_code == 200
    too_much = client.post(CHAT, content=padded + b" ", headers=headers)
    assert (too_much.status_code, too_much.json()["error"]["code"]) == (413, "payload_too_large")


def test_a_body_that_never_ends_is_given_up():
    with serving(StubBackend(), limits=Limits(body_timeout_s=0.1)) as url:
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port), timeout=5) as raw:
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
            )
            answer = b"".join(iter(lambda: raw.recv(4096), b""))  # to the end of the connection
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


class _HeldAtBooks:
    """The tokenizer, which stops at long chats until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(tokenizer(), name)

    def apply_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> list[int]:
        if len(str(messages)) > 100_000:
            assert self.gate.wait(20)
        return tokenizer().apply_chat(messages, **options)


def test_a_short_prompt_does_not_wait_for_a_book():
    backend, held = StubBackend(), _HeldAtBooks()
    backend.tokenizer = cast(Tokenizer, held)
    with (
        serving(backend) as url,
        httpx2.Client(base_url=url, timeout=10) as client,
        ThreadPoolExecutor(1) as reader,
    ):
        book = reader.submit(httpx2.post, url + CHAT, json=said("word " * 30_000), timeout=30)
        try:
            time.sleep(0.2)  # the book is being read
            assert client.post(CHAT, json=chat()).status_code == 200
            assert not book.done()
        finally:
            held.gate.set()
        assert book.result().status_code == 400


def test_a_long_path_is_not_repeated_whole(client: httpx2.Client):
    message = client.get("/" + "a" * 5000).json()["error"]["message"]
    assert len(message) < 200


def test_a_refusal_names_the_neutral_value_as_json(client: httpx2.Client):
    error = client.post(CHAT, json=chat(use_beam_search=True)).json()["error"]
    assert error["message"].endswith("send false.")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods_have_the_same_shape(client: httpx2.Client, method, path, status, code):
    response = client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_shows_the_request_id_and_nothing_else(
    client: httpx2.Client, backend: StubBackend, stream, caplog: pytest.LogCaptureFixture
):
    backend.script = failing(KeyError("/secret/path"))
    response = client.post(CHAT, json=chat(stream=stream), headers={"x-request-id": "abc-7"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("internal_error", "server_error", None)
    assert "abc-7" in error["message"]
    assert "secret" not in response.text
    assert "KeyError" in caplog.text
    assert "abc-7" in caplog.text


def test_unknown_fields_are_accepted_and_named_in_a_header(client: httpx2.Client):
    body = chat(reasoning_effort="low", user="me", **{"x\r\ny": 1, "é" * 100: 2})
    for is_stream in (False, True):
        response = client.post(CHAT, json=body | {"stream": is_stream})
        assert response.status_code == 200
        names = response.headers["x-dflash-ignored"].split(", ")
        assert names[:2] == ["reasoning_effort", "x%0D%0Ay"]
        assert len(names) == 3
        assert max(map(len, names)) <= 64
    assert "x-dflash-ignored" not in client.post(CHAT, json=chat(user="me")).headers
