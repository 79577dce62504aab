"""Keys, request ids, and the routes for operators."""

from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.http import create_app
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, WindowId
from tests.deployments.http_stub import StubBackend, chat, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StubBackend, httpx2.Client]]:
    backend = StubBackend()
    with serving(backend, api_keys=("one", "zwö")) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield backend, client


@pytest.fixture
def client(served: tuple[StubBackend, httpx2.Client]) -> httpx2.Client:
    return served[1]


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("key", ["one", "zwö"])
def test_each_key_opens(client: httpx2.Client, key: str):
    assert client.post(CHAT, json=chat(), headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(("key", "name"), [("one", "key-1"), ("zwö", "key-2")])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"model": "stub-model", "prompt": "Hi"}),
        ("/v1/responses", {"model": "stub-model", "input": "Hi"}),
    ],
)
def test_a_request_is_known_by_its_key_which_it_does_not_tell(
    served: tuple[StubBackend, httpx2.Client], key: str, name: str, path: str, body: dict[str, object]
):
    backend, client = served
    assert client.post(path, json=body, headers=bearer(key)).status_code == 200
    assert backend.last.client == name


def test_without_keys_a_request_is_known_by_its_peers_address():
    backend = StubBackend()
    with serving(backend) as url:
        httpx2.post(f"{url}{CHAT}", json=chat())
        assert backend.last.client == "127.0.0.1"
        httpx2.post(f"{url}{CHAT}", json=chat(), headers={"x-forwarded-for": "10.0.0.7"})
        assert backend.last.client == "10.0.0.7"  # a proxy on this machine is believed


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer on"},
        {"authorization": "Bearer onee"},
        {"authorization": "Basic one"},
        {"authorization": "one"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/metrics"), ("GET", "/nowhere")])
def test_without_a_key_nothing_opens(client: httpx2.Client, method: str, path: str, headers):
    response = client.request(method, path, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (401, "authentication_error")
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


def test_health_and_options_need_no_key(client: httpx2.Client):
    assert client.get("/health").status_code == 200
    assert client.options(CHAT).status_code != 401
    assert client.get("/health/").status_code == 401


@pytest.mark.parametrize(
    ("asked", "given"),
    [("req-1.a_b:c", "req-1.a_b:c"), ("a b\tc<script>", "abcscript"), ("x" * 500, "x" * 128)],
)
def test_a_request_id_is_cleaned_and_returned(served, client: httpx2.Client, asked: str, given: str):
    headers = [(b"x-request-id", asked.encode()), *bearer("one")]
    for is_stream in (False, True):
        response = client.post(CHAT, json=chat(stream=is_stream), headers=headers)
        assert response.headers.get_list("x-request-id") == [given]
        assert served[0].last.request_id == given


async def test_behind_a_proxy_that_returns_the_id_it_is_not_returned_twice():
    transport = httpx2.ASGITransport(create_app(StubBackend(), returns_request_id=False))
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        assert "x-request-id" not in (await client.get("/health", headers={"x-request-id": "a"})).headers


def test_a_request_without_id_gets_one_of_its_own(client: httpx2.Client):
    ids = {
        client.get("/health", headers={"x-request-id": junk}).headers["x-request-id"] for junk in ("", "<>")
    }
    assert len(ids) == 2
    assert all(len(one) == 32 for one in ids)


def test_no_origin_is_let_in(client: httpx2.Client):
    headers = [(b"origin", b"https://evil.example"), *bearer("one")]
    response = client.post(CHAT, json=chat(), headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_health_is_503_unless_ok(served, client: httpx2.Client):
    backend = served[0]
    for state, status in (({"status": "ok", "x": 1}, 200), ({"status": "loading"}, 503), ({}, 503)):
        backend.state = state
        response = client.get("/health")
        assert (response.status_code, response.json()) == (status, state)
        assert client.head("/health").status_code == status
    backend.state = {"status": "ok"}


def test_metrics_are_prometheus_text(served, client: httpx2.Client):
    rows = tuple(RowProgress(RowId(name), (1, 2), 15, 2, 1) for name in "ab")
    served[0].statistics.observe_round(RoundReport(WindowId("w"), 1, 16, rows, 2, 0))
    response = client.get("/metrics", headers=bearer("one"))
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    drafted = samples["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted.value == 30
    assert drafted.labels == {"model_name": "stub-model", "engine": "router-0"}
    # vLLM's benchmark reads lines, not families.
    assert any(
        line.startswith("vllm:spec_decode") and "num_accepted_tokens_total" in line and line.endswith(" 2.0")
        for line in response.text.splitlines()
    )


def test_the_version_is_told(client: httpx2.Client):
    assert client.get("/version", headers=bearer("one")).json()["version"]


def test_the_openapi_document_knows_the_bodies_and_no_422(client: httpx2.Client):
    document = client.get("/openapi.json", headers=bearer("one")).json()
    assert "422" not in str(document["paths"])
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert {"model", "messages", "max_completion_tokens", "top_k"} <= schema["properties"].keys()
    assert document["paths"][CHAT]["post"]["responses"]["429"]
    references = [
        part.split('"')[0] for part in str(document).replace("'", '"').split("#/components/schemas/")[1:]
    ]
    assert set(references) <= document["components"]["schemas"].keys()
