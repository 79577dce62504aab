"""One request of a batch over HTTP, tried again for as long as that may help.

Why HTTP, from inside the cluster too, and not a handle of Serve: a job that is killed takes its connections
with it, so its rows are gone by the next round, while calls through a handle would play on; what the proxy
has in flight counts for autoscaling, what a driver's handle has does not; limits, keys, errors and answers
are those of every other client; and the job's code need not be the cluster's, since no object is pickled
between them. The proxy costs 1 to 4 ms a request: nothing beside an answer.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

from deployments.jobs.requests import Request
from deployments.jobs.results import Reply

_CONNECT_S = 10.0
_LONGEST_PAUSE_S = 30.0
_LONGEST_RETRY_AFTER_S = 600.0
_BUSY = 429
_PASSING = frozenset({502, 503, 504})
_ONCE_MORE = frozenset({408, 500})  # may be the request's own doing: not tried for ever
_MOST_TRIES = 3
_NOT_JSON = "not_json"


class GaveUp(Exception):
    """There was no answer within the patience."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the application is, and how long to try."""

    url: str  # without /v1
    api_key: str | None = None
    timeout_s: float = 900.0  # of one try
    patience_s: float = 300.0  # of trouble with one request: no connection, no answer, 502 to 504

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


class Client:
    """Sends requests, many at a time. A 429 holds back all of them for as long as the server asks."""

    def __init__(self, session: aiohttp.ClientSession, reach: Reach):
        self._session = session
        self._reach = reach
        self._open_at = 0.0  # monotonic; nothing is sent before
        # Since when no request at all has gone through. Or each of many would wait for a server that is gone.
        self._down_since: float | None = None

    async def ask(self, request: Request) -> Reply:
        """Return the server's last word. Raises GaveUp if there was none within the patience."""
        trouble_since: float | None = None
        tries = 0
        while True:
            tries += 1
            await self._wait_for_opening()
            try:
                reply, retry_after = await self._send(request)
                trouble = ""
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reply, retry_after, trouble = None, 0.0, str(error) or type(error).__name__
            if reply is not None and reply.status == _BUSY:
                # The server is well: whatever comes next is new trouble, with tries and patience of its own.
                tries, trouble_since, self._down_since = 0, None, None
                self._hold_back(retry_after or 1.0)
                continue
            if reply is not None and not _may_pass(reply, tries):
                self._down_since = None
                return reply
            now = time.monotonic()
            self._down_since = self._down_since or now
            trouble_since = min(trouble_since or now, self._down_since)
            pause = max(retry_after, min(2.0 ** min(tries, 10) / 4, _LONGEST_PAUSE_S))
            if now + pause - trouble_since > self._reach.patience_s:
                if reply is not None:
                    return reply
                raise GaveUp("no_answer", f"no answer after {tries} tries: {trouble}")
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))

    async def _send(self, request: Request) -> tuple[Reply, float]:
        """One try: the reply, and the seconds that it asks to wait (0: it does not say)."""
        url = self._reach.url.rstrip("/") + request.url
        # json.dumps here, not aiohttp's: its text may hold half surrogates, which escape and do not encode.
        body = json.dumps(request.body).encode()
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            content = await response.read()
            reply = Reply(response.status, _document(content), response.headers.get("x-request-id"))
            if reply.status == 200 and _is_text(reply):
                raise GaveUp(
                    _NOT_JSON, f"{url} answers with something else than JSON: is it the right address?"
                )
            return reply, retry_after_s(response.headers)

    def _hold_back(self, seconds: float) -> None:
        self._open_at = max(self._open_at, time.monotonic() + seconds)

    async def _wait_for_opening(self) -> None:
        while (wait := self._open_at - time.monotonic()) > 0:
            await asyncio.sleep(wait + random.uniform(0.0, 0.25))  # not all in the same instant


@asynccontextmanager
async def connected(reach: Reach) -> AsyncIterator[Client]:
    """A client with its connections; they end with the block."""
    timeout = aiohttp.ClientTimeout(total=reach.timeout_s, sock_connect=_CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0)  # the runner bounds what is in flight
    headers = {"content-type": "application/json", **reach.headers}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Client(session, reach)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of a ``retry-after`` header, which may also be a date; 0 if there is none that can be read."""
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_S)


def _document(content: bytes) -> dict[str, object]:
    """A body as it goes into the output; Ray's proxy answers some failures in plain text."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    message = content.decode(errors="replace")[:1000]
    return {"error": {"message": message, "type": "server_error", "param": None, "code": _NOT_JSON}}


def _may_pass(reply: Reply, tries: int) -> bool:
    """Whether the same request may go well a little later."""
    if reply.status in _ONCE_MORE:
        return tries < _MOST_TRIES
    if reply.status == 404:
        # While an application is replaced, Ray's proxy knows no route: it says so in plain text, we never do.
        return _is_text(reply)
    return reply.status in _PASSING


def _is_text(reply: Reply) -> bool:
    error = reply.body.get("error")
    return isinstance(error, dict) and error.get("code") == _NOT_JSON
