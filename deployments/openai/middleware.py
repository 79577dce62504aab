"""What surrounds every HTTP request: its id, the key check, the size of its body.

Pure ASGI, because Starlette's ``BaseHTTPMiddleware`` stands between a stream and its client's departure.
"""

import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.keys import KeyRing
from deployments.observing.account import current
from deployments.observing.watch import CLIENT_LEFT, Watch
from deployments.openai.errors import InvalidApiKey, PayloadTooLarge, failure_of, is_fault

logger = logging.getLogger(__name__)

_REQUEST_ID = "dflash.request_id"
_CLIENT = "dflash.client"
_UNSAFE = re.compile(rb"[^A-Za-z0-9._:-]+")
_MAX_REQUEST_ID = 128


def request_id_of(scope: Scope) -> str:
    """Return the id that ``RequestContext`` gave to this request."""
    return scope.get(_REQUEST_ID, "")


def client_of(scope: Scope) -> str:
    """Return whose request this is: the name of its key, else its peer's address.

    A proxy on this machine is believed when it names the peer (uvicorn reads ``x-forwarded-for``); one
    elsewhere makes one client of all that come through it.
    """
    address: tuple[str, int] | None = scope.get("client")
    return scope.get(_CLIENT) or (address[0] if address else "")


def cleaned_request_id(value: bytes) -> bytes:
    """What stays of a client's id in logs and headers; empty if nothing does."""
    return _UNSAFE.sub(b"", value)[:_MAX_REQUEST_ID]


def failure_response(error: Exception, scope: Scope) -> Response:
    """Build the answer to a failure; a fault of ours goes to the log with its trace."""
    request_id = request_id_of(scope)
    if is_fault(error):
        logger.error("request %s failed", request_id, exc_info=error)
    failure = failure_of(error, request_id)
    if (account := current()) is not None:
        account.error_kind = failure.body["error"]["code"]
    return JSONResponse(failure.body, failure.status, dict(failure.headers))


class RequestContext:
    """Outermost: gives the request an id, returns it, has it watched, and is where last exceptions end."""

    def __init__(self, app: ASGIApp, returns_id: bool = True, watch: Watch | None = None):
        self._app = app
        self._returns_id = returns_id
        self._watch = watch or Watch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = cleaned_request_id(Headers(scope=scope).get("x-request-id", "").encode("latin-1"))
        request_id = scope[_REQUEST_ID] = asked.decode() or uuid.uuid4().hex
        account = self._watch.open(scope["method"], _path(scope), request_id, _trace_headers(scope))
        status = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                if self._returns_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("request %s: the client went away", request_id)
        except Exception as error:
            if status is not None:
                raise
            await failure_response(error, scope)(scope, receive, send_with_id)
        finally:
            self._watch.close(account, status or CLIENT_LEFT)


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _trace_headers(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


class BearerAuth:
    """Lets requests in that carry one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], open_paths: Iterable[str]):
        self._app = app
        self._keys = KeyRing(api_keys)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, if its key is known."""
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        # Headers are latin-1 on the way in; a key that is not ASCII came as UTF-8 bytes.
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        try:
            key_id = scope[_CLIENT] = self._keys.check(given)
        except InvalidApiKey as error:
            await failure_response(error, scope)(scope, receive, send)
            return
        if (account := current()) is not None:
            account.key_id = key_id
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or _path(scope) in self._open_paths


class BodyLimit:
    """Ends a request whose body is too large, before or while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, if it is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = PayloadTooLarge(f"The body is larger than the limit of {self._max_bytes} bytes.")
        announced = Headers(scope=scope).get("content-length", "")
        # Beyond 18 digits int() has no need to try.
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes):
            await failure_response(too_large, scope)(scope, receive, send)
            return
        taken = 0

        async def receive_some() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise too_large
            return message

        await self._app(scope, receive_some, send)
