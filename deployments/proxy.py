"""Serve's proxies: what they read from their environment, and which of a client's headers they let through.

Ray reads some headers as orders. It decodes them as UTF-8 and answers 500 where they are none. By others a
client could have its request played on when it has left, be given another deadline, or be routed by an id of
its choice.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai.middleware import cleaned_request_id

PATH = "deployments.proxy.middlewares"
GRPC_LIMIT_BYTES = 2**30  # of one by-value message between replicas; Ray's default is 4 MB
# Of one message from a client or to it: what our own client receives. Ray would take in 2 GiB of a stranger's
# before the router sees key and size.
CLIENT_LIMIT_BYTES = 64 * 2**20

# Read by the proxies, which inherit them from the process that starts Ray. They ask routers by gRPC, as our
# deployments ask each other: on two cores a client has its tokens 3 ms earlier, for a quarter less CPU time.
VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PATH,
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(CLIENT_LIMIT_BYTES),
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(GRPC_LIMIT_BYTES),
}

_ORDERS = frozenset(
    {b"serve-multiplexed-model-id", b"x-request-disconnect-disabled", b"x-request-timeout-seconds"}
)
_REQUEST_ID = b"x-request-id"
_SESSION_ID = b"x-session-id"
_PLAIN = re.compile(rb"[\x21-\x7e]{1,256}")

Header = tuple[bytes, bytes]


def install() -> None:
    """Give ``VARIABLES`` to the proxies of a cluster that this process is about to start."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def middlewares() -> list[Middleware]:
    """What Serve puts around its proxy's application; the last is the outermost."""
    return [Middleware(CleanHeaders)]


class CleanHeaders:
    """Takes out what Ray would stumble over or obey."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] in ("http", "websocket"):
            scope = {**scope, "headers": list(_cleaned(scope["headers"]))}
        await self._app(scope, receive, send)


def _cleaned(headers: Iterable[Header]) -> Iterator[Header]:
    has_id = False
    for name, value in headers:
        plain = name.lower().replace(b"_", b"-")
        if plain in _ORDERS or not name.isascii():
            continue
        if plain == _REQUEST_ID:
            value = cleaned_request_id(value)
            if has_id or not value:
                continue
            has_id = True
        elif plain == _SESSION_ID and not _PLAIN.fullmatch(value):
            continue
        yield name, value
