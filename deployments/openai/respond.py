"""Plays a generation and puts its answer on the wire, streamed or whole."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.generation import Backend, Event, Generation, Started
from deployments.openai import sse
from deployments.openai.errors import ErrorBody, failure_of, is_fault
from deployments.openai.limits import Limits
from deployments.openai.reader import EventReader

logger = logging.getLogger(__name__)


class Telling(Protocol):
    """How a dialect tells the events of one generation."""

    ending: bytes  # what a stream closes with

    def add(self, event: Event) -> None:
        """Take an event of a whole answer."""
        ...

    def whole(self) -> Mapping[str, object]:
        """The answer in one object, once every choice has ended."""
        ...

    def frames(self, event: Event) -> bytes:
        """Take an event of a stream; what it puts there, often nothing."""
        ...

    def failure(self, body: ErrorBody) -> bytes:
        """What a stream says when it breaks off."""
        ...


class GenerationResponse(Response):
    """Opens the backend's events when called and closes them when the client has its answer or is gone.

    What fails before the first byte is raised, for the application to answer with a status.
    """

    def __init__(
        self,
        backend: Backend,
        generation: Generation,
        answer: Telling,
        limits: Limits,
        headers: Mapping[str, str],
    ):
        super().__init__(headers=headers)
        self._backend = backend
        self._generation = generation
        self._answer = answer
        self._limits = limits
        self._own_headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes away first."""
        async with EventReader(
            self._backend.generate(self._generation), self._generation.num_choices
        ) as events:
            if self._generation.delivery.stream:
                answer = self._stream(events, send)
            else:
                answer = self._collect(events, scope, receive, send)
            if not await unless_disconnected(receive, answer):
                logger.info("request %s: the client went away", self._generation.request_id)

    async def _collect(self, events: EventReader, scope: Scope, receive: Receive, send: Send) -> None:
        while not events.has_ended:
            event = await events.next()
            if event is not None:
                self._answer.add(event)
        body = await self._written(self._whole)
        response = Response(body, headers=self._own_headers, media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, events: EventReader, send: Send) -> None:
        event = await self._peek(events)
        headers = [(k.encode(), v.encode()) for k, v in {**sse.HEADERS, **self._own_headers}.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_events(event, events, send)
        except Exception as error:  # the status is out: what is left is an event of its own
            if is_fault(error):
                logger.exception("request %s failed in its stream", self._generation.request_id)
            failure = failure_of(error, self._generation.request_id)
            await _send_body(send, self._answer.failure(failure.body))
        if self._answer.ending:
            await _send_body(send, self._answer.ending)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _whole(self) -> bytes:
        return sse.encode(self._answer.whole())

    def _frames(self, event: Event) -> bytes:
        return self._answer.frames(event)

    async def _written(self, write: Callable[..., bytes], *events: Event) -> bytes:
        """Write JSON; off the event loop where log-probabilities make it long, or every stream would wait."""
        if self._generation.num_top_logprobs is None:
            return write(*events)
        return await asyncio.to_thread(write, *events)

    async def _peek(self, events: EventReader) -> Event | None:
        """Wait for something to show, a while: until then a failure can still have a status."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._limits.peek_s
        event = await events.next(self._limits.peek_s)
        while isinstance(event, Started):
            self._answer.add(event)
            event = await events.next(max(until - clock(), 0.001))
        return event

    async def _send_events(self, event: Event | None, events: EventReader, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        while True:
            body = await self._written(self._frames, event) if event is not None else b""
            # Rounds may go on and show nothing for long: a call comes when it is whole.
            if not body and (event is None or clock() - sent_at >= self._limits.keepalive_s):
                body = sse.KEEPALIVE
            if body:
                await _send_body(send, body)
                sent_at = clock()
            if events.has_ended:
                return
            event = await events.next(self._limits.keepalive_s)


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def unless_disconnected(receive: Receive, work: Awaitable[None]) -> bool:
    """Await ``work``, cancelling it when the client goes away; return whether it was done."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
    if not leaving.cancelled():
        leaving.exception()  # a transport that breaks has left too
    if working.cancelled():
        return False
    working.result()
    return True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
