"""The official client against our server."""

from collections.abc import Iterator

import openai
import pytest

from dflash_core.errors import DeadlineExceeded, QueueFull, RowFailed, Unavailable
from tests.deployments.http_stub import CONTEXT, StubBackend, failing, serving


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, openai.OpenAI]]:
    backend = StubBackend()
    with (
        serving(backend, api_keys=("one", "zwö")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client,
    ):
        yield backend, client


@pytest.fixture
def backend(served: tuple[StubBackend, openai.OpenAI]) -> Iterator[StubBackend]:
    backend, _ = served
    script = backend.script
    yield backend
    backend.script = script


@pytest.fixture
def client(served: tuple[StubBackend, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def ask(client: openai.OpenAI, **fields: object):
    body: dict = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return client.chat.completions.create(**body)


def test_a_chat_answers_with_text_and_usage(client: openai.OpenAI, backend: StubBackend):
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.model == "stub-model"
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    prompt = len(backend.last.prompt_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 5)
    assert answer.usage.total_tokens == prompt + 5
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 27
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_dump()["dflash"] == {
        "rounds": 2,
        "drafted": 30,
        "walked": 4,
        "accepted": 3,
        "mean_accept": 1.5,
        "window": "window-1",
        "lane": "lane-1",
    }


def test_a_streamed_chat_gives_the_same_text(client: openai.OpenAI):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_completions_answer_whole_and_streamed(client: openai.OpenAI):
    whole = client.completions.create(model="org/stub", prompt="Once")
    assert (whole.object, whole.choices[0].text, whole.model) == (
        "text_completion",
        "Hello, world",
        "org/stub",
    )
    stream = client.completions.create(model="org/stub", prompt=[1, 2, 3], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world"


def test_models_are_listed_and_retrieved_under_every_name(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["stub-model", "org/stub"]
    model = client.models.retrieve("org/stub")
    assert (model.id, model.created, model.owned_by) == ("org/stub", 1_700_000_000, "dflash-serve")
    facts = model.model_dump()
    assert facts["max_model_len"] == CONTEXT
    assert facts["dflash"]["defaults"]["temperature"] == 0.6


def test_a_wrong_request_is_a_bad_request_that_names_its_field(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="nobody")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/at-all")


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI):
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(client.with_options(api_key="two"))
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "code", "retry_after"),
    [
        (QueueFull("no room", retry_after=1.2), openai.RateLimitError, "queue_full", "2"),
        (Unavailable("draining"), openai.InternalServerError, "unavailable", "5"),
        (RowFailed("non-finite logits"), openai.InternalServerError, "row_failed", None),
        (DeadlineExceeded("too late"), openai.APIStatusError, "deadline_exceeded", None),
    ],
)
def test_failures_before_the_first_token_have_a_status_streamed_or_not(
    client: openai.OpenAI, backend: StubBackend, error, expected, code, retry_after, stream
):
    backend.script = failing(error)
    with pytest.raises(expected) as caught:
        ask(client, stream=stream)
    assert caught.value.code == code
    assert caught.value.message.count(str(error)) == 1
    assert caught.value.response.headers.get("retry-after") == retry_after
