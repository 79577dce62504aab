"""The console's routes, and round detail in a chat's own stream."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from deployments.console.files import FILES
from deployments.view import RouterView, row_label
from tests.deployments.console_stub import ANSWER, WIDTHS, DeskBackend
from tests.deployments.http_stub import StubBackend, chat, events, serving, tokenizer

KEY = {"authorization": "Bearer one"}
ROUNDS = {"dflash": {"rounds": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[DeskBackend, httpx2.Client]]:
    backend = DeskBackend(pace_s=0.001)
    with serving(backend, api_keys=("one",)) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield backend, client


@pytest.fixture
def client(served: tuple[DeskBackend, httpx2.Client]) -> httpx2.Client:
    return served[1]


def stream(client: httpx2.Client, **fields: object) -> list[dict]:
    response = client.post("/v1/chat/completions", json=chat(stream=True, **fields), headers=KEY)
    assert response.status_code == 200, response.text
    blocks = [block.removeprefix("data: ") for block in events(response) if block.startswith("data: {")]
    return [json.loads(block)["choices"][0] for block in blocks]


def test_the_page_and_its_files_need_no_key_and_are_fenced_in(client: httpx2.Client):
    for path in FILES:
        response = client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        same = client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
    assert client.get("/console").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/console/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/", "/console/"):
        assert client.get(path, follow_redirects=True).url.path == "/console"


def test_the_page_has_nothing_inline_and_nothing_from_outside(client: httpx2.Client):
    page = client.get("/console").text
    for forbidden in ("<style", " style=", " onclick", "javascript:", "http://", "https://", "//cdn"):
        assert forbidden not in page
    assert page.count("<script") == 1
    assert '<script type="module" src="console/app.js"></script>' in page


def test_the_state_needs_a_key_and_other_files_do_not_exist(client: httpx2.Client):
    assert client.get("/console/state").status_code == 401
    assert client.get("/console/nothing.js", headers=KEY).status_code == 404
    assert client.get("/console/../http.py", headers=KEY).status_code == 404


def test_the_state_tells_numbers_and_no_words(served: tuple[DeskBackend, httpx2.Client]):
    backend, client = served
    secret = chat(messages=[{"role": "user", "content": "my secret question"}])
    assert client.post("/v1/chat/completions", json=secret, headers=KEY).status_code == 200
    response = client.get("/console/state", headers=KEY)
    state = response.json()
    assert response.headers["cache-control"] == "no-store"
    [router] = state["routers"]
    assert (state["model"], state["asked"], state["missing"]) == ("stub-model", "router-0", 0)
    num_said = len(tokenizer().encode(ANSWER)) + 1
    assert router["tokens"] % num_said == 0
    window = router["windows"][-1]
    assert {played["width"] for played in window["rounds"]} <= set(WIDTHS)
    label = row_label(backend.last.row_id())
    rows = [row for played in window["rounds"] for row in played["rows"] if row[0] == label]
    assert sum(accepted + own for _, _, _, accepted, own, _ in rows) == num_said
    assert rows[-1][-1] == "stop"
    assert "secret" not in response.text
    assert backend.last.id not in response.text
    assert "Paris" not in response.text


def test_a_router_that_is_silent_is_counted(served: tuple[DeskBackend, httpx2.Client]):
    backend, client = served
    backend.siblings = (RouterView.now(StubBackend().statistics.snapshot()),)
    backend.num_missing = 2
    try:
        state = client.get("/console/state", headers=KEY).json()
    finally:
        backend.siblings, backend.num_missing = (), 0
    assert (len(state["routers"]), state["missing"]) == (2, 2)


def test_each_token_of_a_stream_says_where_it_came_from(client: httpx2.Client):
    choices = stream(client, max_tokens=200, **ROUNDS)
    played = [choice["dflash"] for choice in choices if "dflash" in choice]
    for number, part in enumerate(played):
        numbers = part["round"]
        assert numbers["width"] == numbers["drafted"] + 1 in WIDTHS
        first = [] if number else ["classic"]  # reading the prompt gave it
        own = "bonus" if numbers["drafted"] else "classic"
        expected = [*first, *["accepted"] * numbers["accepted"], own]
        assert [token["source"] for token in part["tokens"]] == expected[: len(part["tokens"])]
    ids = [token["id"] for part in played for token in part["tokens"]]
    assert tokenizer().decode(ids) == ANSWER
    assert {"accepted", "bonus", "classic"} == {t["source"] for part in played for t in part["tokens"]}


@pytest.mark.parametrize("stop", [None, "three, four", "seven, ate"])
def test_text_held_back_still_says_whose_it_is(client: httpx2.Client, stop: str | None):
    choices = stream(client, max_tokens=200, stop=stop, **ROUNDS)
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    assert content == (ANSWER.partition(stop)[0] if stop else ANSWER)
    played = [choice["dflash"] for choice in choices if "dflash" in choice]
    pieces = [piece for part in played for piece in part["text"]]
    assert "".join(text for _, text in pieces) == content
    ids = [token["id"] for part in played for token in part["tokens"]]
    by_token = [""] * len(ids)
    for number, text in pieces:
        by_token[number] += text
    for token_id, text in zip(ids, by_token, strict=True):  # of a cut token at least its beginning
        whole = tokenizer().decode([token_id])
        assert text == whole or "\ufffd" in whole or (stop and whole.startswith(text))


def test_an_answer_in_one_piece_has_all_its_rounds(client: httpx2.Client):
    body = chat(max_tokens=200, **ROUNDS)
    [choice] = client.post("/v1/chat/completions", json=body, headers=KEY).json()["choices"]
    pieces = [text for played in choice["dflash"]["rounds"] for _, text in played["text"]]
    assert "".join(pieces) == choice["message"]["content"] == ANSWER


def test_nobody_is_told_of_rounds_unasked(client: httpx2.Client):
    assert not any("dflash" in choice for choice in stream(client))
    refused = client.post("/v1/chat/completions", json=chat(dflash={"round": True}), headers=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dflash.round")
