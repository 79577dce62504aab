"""Requests that are made to hurt, each of which once got more than a refusal."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.http_util import _apply_middlewares, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path

from deployments.http import create_app
from deployments.openai.fields import ignored_fields
from deployments.openai.limits import Limits
from deployments.preparing import Preparer
from deployments.proxy import PATH, CleanHeaders
from deployments.rpc.tokenizer_files import archive
from deployments.settings import SettingsError, load_settings
from tests.deployments.http_stub import StubBackend, chat
from tests.fuzz.edges import KEY, check_http, post, request

CHAT = "/v1/chat/completions"


def error_of(body: bytes) -> dict[str, Any]:
    return json.loads(body)["error"]


@pytest.mark.parametrize("host", [b"[", b"[::1", b"a/b?c#d", b"\xff", b"x:y:z", b""])
def test_an_unknown_route_is_404_whatever_the_host_says(host: bytes) -> None:
    answer = request("GET", "/nowhere", [(b"host", host)])
    assert answer.status == 404
    assert error_of(answer.body)["message"].startswith("Unknown route: GET /nowhere.")
    assert request("GET", CHAT, [(b"host", host)]).status == 405


def test_what_a_client_wrote_is_not_sent_back_by_the_megabyte() -> None:
    long = "k" * 300_000
    bodies = [
        chat(logit_bias={long: "x"}),
        chat(logit_bias={long: 1}),
        chat(model=long[:600]),
        chat(messages=[{"role": long, "content": "x"}]),
        chat(chat_template_kwargs={"messages": long}),
    ]
    for body in bodies:
        answer = post(CHAT, json.dumps(body).encode())
        assert answer.status in (400, 404)
        assert len(answer.body) < 2000
        check_http(answer)


def test_no_more_than_twenty_of_many_unknown_names_are_written_out() -> None:
    names = {f"{i:06}" + "é" * 50: None for i in range(100_000)}
    found = ignored_fields(names)
    assert len(found) == 20
    assert max(map(len, found)) <= 64


def test_a_compressed_body_is_refused_and_never_unpacked() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    for encoding in (b"gzip", b"GZIP", b"br", b"identity, gzip", b"\xff"):
        answer = post(CHAT, bomb, [(b"content-encoding", encoding)])
        assert (answer.status, error_of(answer.body)["code"]) == (400, "invalid_content_encoding")
    assert post(CHAT, json.dumps(chat()).encode(), [(b"content-encoding", b"identity")]).status == 200


def test_a_chat_of_every_private_character_gets_its_refusal() -> None:
    everything = "".join(map(chr, range(0xE000, 0x110000)))
    body = json.dumps(chat(messages=[{"role": "user", "content": everything}]), ensure_ascii=False).encode()
    backend = StubBackend()
    app = create_app(backend, limits=Limits(max_body_bytes=8 * 2**20))
    sent: list[Any] = []

    async def play() -> None:
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return waiting.pop() if waiting else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
        async with asyncio.timeout(60):
            await app(scope, receive, send)

    asyncio.run(play())
    assert sent[0]["status"] == 400
    assert backend.generations == []


async def test_work_that_runs_out_of_an_iterator_is_an_error_and_no_hang() -> None:
    def work() -> None:
        next(iter(()))

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await Preparer(StubBackend(), Limits()).run(1, work)


@pytest.mark.parametrize(
    ("name", "value", "passed"),
    [
        (b"x-request-id", b"\xff\xfe", None),
        (b"x-request-id", b"a\xffb c", b"abc"),
        (b"x-request-id", b"abc-1", b"abc-1"),
        (b"X-Request-Id", b"x" * 70_000, b"x" * 128),
        (b"x-session-id", b"\xff", None),
        (b"x-session-id", b"a b", None),
        (b"x_session_id", b"user-7", b"user-7"),
        (b"serve_multiplexed_model_id", b"m", None),
        (b"Serve-Multiplexed-Model-Id", b"\xff", None),
        (b"x-request-timeout-seconds", b"0.0001", None),
        (b"x-request-disconnect-disabled", b"?1", None),
        (b"n\xff", b"v", None),
        (b"authorization", b"Bearer \xff", b"Bearer \xff"),
    ],
)
async def test_the_proxy_passes_on_no_header_that_ray_would_stumble_over_or_obey(
    name: bytes, value: bytes, passed: bytes | None
) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    original = {"type": "http", "headers": [(name, value), (b"host", b"h")]}
    await CleanHeaders(app)(original, None, None)  # type: ignore[arg-type]
    assert seen[0] == ([(name, passed)] if passed is not None else []) + [(b"host", b"h")]
    assert len(original["headers"]) == 2


async def test_rays_proxy_takes_our_callback_and_has_it_outermost() -> None:
    installed: Any = validate_http_proxy_callback_return(call_function_from_import_path(PATH))
    app = _apply_middlewares(_answering, installed)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", b"\xff"), (b"x-request-disconnect-disabled", b"?1")]
    await app({"type": "http", "headers": headers}, _nothing, send)
    names = dict(sent[0]["headers"])
    assert names[b"seen"] == b"x-request-id"  # one of Ray's own making
    assert len(names[b"x-request-id"]) == 36


async def _answering(scope: Any, receive: Any, send: Any) -> None:
    seen = b",".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"seen", seen)]})


async def _nothing() -> Any:
    raise AssertionError


async def test_of_two_request_ids_the_first_good_one_counts() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    headers = [(b"x-request-id", b"\xff"), (b"x-request-id", b"a"), (b"x-request-id", b"b")]
    await CleanHeaders(app)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [[(b"x-request-id", b"a")]]


@pytest.mark.parametrize(
    "given", [b"", b"Bearer", b"Bearer ", b"Bearer \xff\xfe", b"Basic " + KEY.encode(), KEY.encode()]
)
def test_a_bad_key_is_401_and_no_answer_or_log_has_the_right_one(
    given: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    for path in (CHAT, "/metrics", "//health", "/health/", "/health/../metrics", "/Health", "/%68ealth"):
        answer = request("GET", path, [(b"authorization", given)], is_locked=True)
        assert answer.status == 401
        check_http(answer, given + path.encode())
    assert KEY not in caplog.text


@pytest.mark.parametrize("keys", [5, [["sk-secret"]], {"sk-secret": 1}, [{"key": "sk-secret"}]])
def test_keys_in_settings_that_cannot_be_used_are_not_shown(tmp_path: Path, keys: object) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"api_keys": keys}))
    with pytest.raises(SettingsError, match="api_keys") as caught:
        load_settings(file, environment={})
    assert "sk-secret" not in str(caught.value)


def test_the_tokenizers_archive_has_no_file_of_anywhere_else(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("root:x:0")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "passwd.jinja").symlink_to(secret)
    (folder / "vocab.json").symlink_to("../secret")
    assert names_of(folder) == ["tokenizer.json"]


def test_the_hubs_cache_is_links_and_is_archived(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/123")
    assert names_of(folder) == ["tokenizer.json"]


def names_of(folder: Path) -> list[str]:
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(archive(folder).data)).namelist()
