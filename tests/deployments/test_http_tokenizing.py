"""Tokens of prompts and text of tokens, in vLLM's shapes; and known routes that are not served."""

from collections.abc import Iterator

import httpx2
import openai
import pytest

from tests.deployments.http_stub import CONTEXT, StubBackend, chat, serving, tokenizer

MISSING = "missing_required_parameter"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, httpx2.Client]]:
    backend = StubBackend()
    with serving(backend) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield backend, client


@pytest.fixture
def client(served: tuple[StubBackend, httpx2.Client]) -> httpx2.Client:
    return served[1]


def test_a_prompt_and_back(client: httpx2.Client):
    answer = client.post("/tokenize", json={"model": "stub-model", "prompt": "Hi, <|im_end|> Zürich"}).json()
    ids = tokenizer().encode("Hi, <|im_end|> Zürich")
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    back = client.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": "Hi, <|im_end|> Zürich"}


def test_token_strings_come_when_asked_for(client: httpx2.Client):
    answer = client.post("/tokenize", json={"prompt": "Hi you", "return_token_strs": True}).json()
    assert answer["token_strs"] == [tokenizer().token(i) for i in answer["tokens"]]
    assert "".join(answer["token_strs"]) == "HiĠyou"


@pytest.mark.parametrize("extra", [{}, {"tools": [TOOL]}])
def test_a_conversation_has_the_tokens_that_the_chat_endpoint_plays(
    served: tuple[StubBackend, httpx2.Client], extra
):
    backend, client = served
    answer = client.post("/tokenize", json={"messages": MESSAGES, **extra}).json()
    assert client.post("/v1/chat/completions", json=chat(**extra)).status_code == 200
    assert answer["tokens"] == list(backend.last.prompt_ids)
    body = {"messages": MESSAGES, "add_generation_prompt": False, **extra}
    history = client.post("/tokenize", json=body).json()
    assert answer["tokens"][: history["count"]] == history["tokens"]
    assert history["count"] < answer["count"]


def test_no_text_has_no_tokens(client: httpx2.Client):
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, None, "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, None, "invalid_value"),
        ("/tokenize", {"prompt": 3}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model", "model_not_found"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content", MISSING),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template", "invalid_value"),
        ("/detokenize", {}, 400, "tokens", MISSING),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [1, 8192]}, 400, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model", "model_not_found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: httpx2.Client, path, body, status, param, code):
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)


def test_the_version_has_vllms_shape(client: httpx2.Client):
    answer = client.get("/version").json()
    assert list(answer) == ["version"]
    assert isinstance(answer["version"], str)


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "/v1/embeddings", "no embedding model"),
        ("POST", "/v1/audio/speech", "not sound"),
        ("POST", "/v1/images/generations", "not images"),
        ("GET", "/v1/files/file-1/content", "stores nothing"),
        ("POST", "/v1/batches", "no batch endpoint"),
        ("POST", "/v1/assistants", "'tools'"),
        ("POST", "/v1/threads/t/runs", "'messages'"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "stores no completions"),
        ("POST", "/api/chat", "Ollama"),
        ("GET", "/tokenizer_info", "not given out"),
    ],
)
def test_a_known_route_that_is_not_served_says_why(client: httpx2.Client, method, path, reason):
    response = client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, "not_found", "invalid_request_error")
    assert reason in error["message"]
    assert path in error["message"]


def test_an_unknown_route_gives_no_reason(client: httpx2.Client):
    for path in ("/v1", "/v1/nothing", "/v1/embeddings2"):
        assert client.post(path).json()["error"]["message"].startswith("Unknown route")


def test_the_official_client_sees_not_found(client: httpx2.Client):
    with (
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as official,
        pytest.raises(openai.NotFoundError, match="no embedding model") as caught,
    ):
        official.embeddings.create(model="stub-model", input="Hi")
    assert caught.value.code == "not_found"
