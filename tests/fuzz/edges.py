"""The edges, called in process: an HTTP request, a gRPC message, and what no answer to them may say."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import Mock

import grpc
from ray.serve.grpc_util import RayServegRPCContext
from starlette.types import ASGIApp, Message

from deployments.http import create_app
from deployments.keys import KeyRing
from deployments.openai.limits import Limits
from deployments.proxy import CleanHeaders
from deployments.rpc.access import Access
from deployments.rpc.boundary import answered, streamed
from deployments.rpc.entrance import Entrance
from deployments.rpc.mlx_engine import MlxEngine
from deployments.rpc.service import DFlashService
from dflash_core.pair import TARGET
from tests.deployments.http_stub import StubBackend

KEY = "sk-a-key-that-nobody-may-see"
LIMITS = Limits(max_body_bytes=2**20, body_timeout_s=5.0)
REFUSALS = {400, 401, 404, 405, 408, 413, 429}
CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# A trace, a path of ours, an object's address, a process: what an answer must not have, unless it was sent.
_SECRETS = re.compile(
    r"Traceback|site-packages|File \"|\.py\b|/work/|/home/|/root/|/usr/lib|object at 0x|\bpid\b|" + KEY
)

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@cache
def loop() -> asyncio.AbstractEventLoop:
    """One loop for all inputs: making one costs more than a request."""
    return asyncio.new_event_loop()


@cache
def http_app(is_locked: bool = False) -> ASGIApp:
    """The application behind what Serve's proxy has around it."""
    return CleanHeaders(create_app(StubBackend(), limits=LIMITS, api_keys=(KEY,) if is_locked else ()))


@cache
def grpc_services() -> tuple[DFlashService, MlxEngine]:
    """Both contracts over the same stub."""
    backend = StubBackend()
    entrance = Entrance(backend, LIMITS, Access(KeyRing(())))
    return DFlashService(backend, entrance), MlxEngine(backend, entrance, lambda: TARGET)


def post(path: str, body: bytes, headers: Headers = ()) -> HttpAnswer:
    """Send a body of JSON, right or not."""
    return request("POST", path, [(b"content-type", b"application/json"), *headers], body)


def request(
    method: str, path: str, headers: Headers = (), body: bytes = b"", *, is_locked: bool = False
) -> HttpAnswer:
    """Send a request as a server would hand it on."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(errors="surrogatepass"),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": list(headers),
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8000),
    }
    return loop().run_until_complete(_played(http_app(is_locked), scope, body))


async def _played(app: ASGIApp, scope: dict[str, Any], body: bytes) -> HttpAnswer:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(20):
        await app(scope, receive, send)
    start = sent[0]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return HttpAnswer(start["status"], dict(start["headers"]), body)


def check_http(answer: HttpAnswer, sent: bytes = b"") -> None:
    """An answer, or a refusal in OpenAI's shape that is short and keeps our secrets."""
    if answer.status in (200, 204):
        return
    if answer.status == 307:  # from where a browser begins
        assert answer.headers[b"location"] == b"/console"
        return
    assert answer.status in REFUSALS, (answer.status, answer.body[:500])
    if not answer.body:  # to HEAD
        return
    error = json.loads(answer.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 1000
    assert len(error["param"] or "") <= 200
    check_no_secret(error["message"], sent)
    for name, value in answer.headers.items():
        assert name.isascii()
        assert value.isascii(), (name, value)
        assert b"\n" not in value


def check_no_secret(text: str, sent: bytes = b"") -> None:
    """Nothing of ours in it, unless the sender wrote it."""
    found = _SECRETS.search(text)
    assert found is None or found.group().encode() in sent or b"\\u" in sent, text


def grpc_context(**metadata: str) -> RayServegRPCContext:
    """What Serve's proxy makes of a call and sends along."""
    raw = Mock()
    raw.invocation_metadata.return_value = list(metadata.items())
    raw.trailing_metadata.return_value = [("request_id", "r1")]
    raw.peer.return_value = "ipv4:127.0.0.1:5000"
    raw.code.return_value = None
    raw.details.return_value = ""
    return RayServegRPCContext(raw)


def call(method: str, message: Any) -> RayServegRPCContext:
    """Call a method of one of the services; its status is in the context."""
    ours, smgs = grpc_services()
    context = grpc_context()

    async def play() -> None:
        if method == "GenerateOnce":
            await answered(context, ours.generate_once(message, context))
            return
        messages = (
            ours.generate(message, context) if method == "Generate" else smgs.generate(message, context)
        )
        async for _ in streamed(context, messages):
            pass

    loop().run_until_complete(asyncio.wait_for(play(), 20))
    return context


def check_grpc(context: RayServegRPCContext, sent: bytes = b"") -> None:
    """No failure, or one that is the caller's, in words and metadata that gRPC can carry."""
    if context.code() is None:
        return
    assert context.code() in CODES, (context.code(), context.details())
    assert len(context.details()) <= 400
    check_no_secret(context.details(), sent)
    for name, value in context.trailing_metadata():
        assert name.isascii()
        assert value.isascii()
        assert value.isprintable(), (name, value)
