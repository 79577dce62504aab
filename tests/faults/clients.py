"""Events that clients bring about: leaving, asking for what cannot be, sending what is none."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from ray import serve

from deployments.app import APP_NAME
from deployments.generation import Generation, GenerationId
from dflash_core.errors import ContextLengthExceeded, InvalidRequest
from dflash_core.request import Sampling
from tests.faults.application import KEYS, Application
from tests.faults.report import Row
from tests.faults.streams import CHAT, Heard, HttpClient, Question, RpcClient
from tests.faults.traffic import QUESTIONS, References, Traffic

ERROR_FIELDS = {"message", "type", "param", "code"}
FREED_S = 2.0  # the next round, and what it takes to ask
DEADLINE_S = 3.0  # of an answer that takes longer
LONG = Question("Write a Python function that adds two numbers.", 2000)
BAD_BODIES: tuple[Any, ...] = (
    b"{",
    b"\xff\xfe",
    [],
    {"model": "demo"},
    {"model": "other", "messages": [{"role": "user", "content": "Hi"}]},
    {"model": "demo", "messages": "Hi"},
    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10**9},
    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": -1},
    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"x": 1}},
)


async def clients_leave(app: Application, references: References) -> Row:
    """A passed deadline; sockets closed and calls cancelled in mid-answer, and one of each in the queue."""
    row = Row("clients leave, running and queued; a deadline passes")
    async with (
        Traffic(app, references, num_http=2, num_rpc=0) as traffic,
        HttpClient(app.url, KEYS[1]) as http,
        RpcClient(app.rpc_address, KEYS[1]) as rpc,
    ):
        await traffic.flow(2.0)
        late = await rpc.stream(LONG, Heard(LONG), timeout_s=DEADLINE_S)
        ended = (late.error, late.num_tokens > 0)
        row.require(ended == ("deadline_exceeded", True), f"a deadline passed, and the client had {ended}")
        is_gone = await _seconds_until(lambda: app.health()["running"] <= 2, late.ended, 10.0)
        row.require_within(is_gone, FREED_S, "a row is freed at its deadline")
        leavers = [Heard(LONG) for _ in range(app.num_rows)]  # beside two others: two of them must wait
        reading = [
            asyncio.create_task((http, rpc)[number % 2].stream(LONG, heard))
            for number, heard in enumerate(leavers)
        ]
        await _until(lambda: sum(bool(heard.samples) for heard in leavers) >= app.num_rows - 2, 30)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        left = time.monotonic()

        def is_freed() -> bool:
            health = app.health()
            return health["waiting"] == 0 and health["running"] <= 2

        row.recovery_s = await _seconds_until(is_freed, left, 10.0)
        row.require_within(row.recovery_s, FREED_S, "rows are freed")
        row.require(not any(heard.ended for heard in leavers), "a leaver had its answer already")
    row.num_lost, row.num_errors = traffic.num_lost, len(traffic.errors)
    row.require(not row.num_lost and not row.num_errors, "neighbours were disturbed")
    return row


async def readers_stall(app: Application, references: References) -> Row:
    """Sockets that nobody reads: their rows play to their ends and leave, whatever the sockets do."""
    row = Row("readers stall")
    async with Traffic(app, references, num_http=1, num_rpc=1) as traffic:
        await traffic.flow(1.0)
        with ExitStack() as sockets:
            for _ in range(3):
                sockets.enter_context(_unread(app, Question(LONG.text, 300)))
            came = time.monotonic()
            await _seconds_until(lambda: _num_there(app) >= 5, came, 10.0)
            row.recovery_s = await _seconds_until(lambda: _num_there(app) <= 2, came, 60.0)
            row.require_within(row.recovery_s, 60.0, "their rows are done")
    row.num_lost, row.num_errors = traffic.num_lost, len(traffic.errors)
    row.require(not row.num_lost and not row.num_errors, "neighbours were disturbed")
    return row


def _unread(app: Application, question: Question) -> socket.socket:
    """A connection that asked, and takes little in."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((app.settings.host, app.settings.http_port))
    body = json.dumps(question.body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[1]}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def _num_there(app: Application) -> int:
    health = app.health()
    return health["running"] + health["waiting"]


async def row_fails(app: Application, references: References) -> Row:
    """Rows that cannot be played, past the edge's own checks: they alone end, each with its own error."""
    row = Row("a row fails (context full, bad grammar)")
    async with Traffic(app, references) as traffic:
        await traffic.flow(1.0)
        struck = time.monotonic()
        full = await asyncio.to_thread(_error_of, max_tokens=10**6)
        row.detection_s = time.monotonic() - struck
        row.require(isinstance(full, ContextLengthExceeded), f"a full context ended with {full!r}")
        wrong = await asyncio.to_thread(_error_of, grammar="start: nothing")
        is_told = isinstance(wrong, InvalidRequest) and "unknown name" in str(wrong)
        row.require(is_told, f"a bad grammar ended with {wrong!r}")
    row.num_lost, row.num_errors = traffic.num_lost, len(traffic.errors)
    row.require(not row.num_lost and not row.num_errors, "neighbours were disturbed")
    return row


def _error_of(max_tokens: int = 20, grammar: str | None = None) -> Exception | None:
    name = GenerationId(f"fails-{time.monotonic()}")
    generation = Generation(
        name, "demo", (1, 2, 3), max_tokens, Sampling(), frozenset(), (), 60.0, grammar=grammar
    )
    response = serve.get_app_handle(APP_NAME).options(stream=True).generate.remote(generation)
    try:
        for _ in cast(Any, response):
            pass
    except Exception as error:
        return getattr(error, "cause", error)
    return None


async def bad_input(app: Application, references: References) -> Row:
    """OpenAI's error object for each, never 422 or 500, and nothing half-admitted."""
    row = Row(f"bad input, {len(BAD_BODIES)} kinds")
    slowest = 0.0
    async with HttpClient(app.url, KEYS[0]) as client:
        for body in BAD_BODIES:
            began = time.monotonic()
            response = await client.post(body)
            slowest = max(slowest, time.monotonic() - began)
            error = json.loads(response.content).get("error", {})
            is_ours = response.status_code in (400, 404) and set(error) >= ERROR_FIELDS
            row.require(is_ours, f"{body!r:.40}: {response.status_code} {response.text:.80}")
        row.detection_s = slowest
        row.num_lost = references.num_lost(await client.whole(QUESTIONS[0]))
        row.require(not row.num_lost, "the next answer is another")
    health = await asyncio.to_thread(app.health)
    row.require((health["running"], health["waiting"]) == (0, 0), "something was half admitted")
    return row


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        await asyncio.sleep(0.02)


async def _seconds_until(condition: Callable[[], bool], since: float, timeout_s: float) -> float | None:
    while time.monotonic() < since + timeout_s:
        if await asyncio.to_thread(condition):
            return time.monotonic() - since
        await asyncio.sleep(0.02)
    return None
