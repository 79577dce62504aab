"""The line and the span of each request, over HTTP and gRPC, and what must never be in them."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.http import create_app
from deployments.keys import KeyRing
from deployments.observing import exporting, spans
from deployments.observing.following import Follower, shown
from deployments.observing.lines import Line, write_logs
from deployments.observing.watch import Watch
from deployments.openai.limits import Limits
from deployments.rpc.access import Access
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.entrance import Entrance
from deployments.rpc.service import DFlashService
from deployments.rpc.watched import Calls
from deployments.settings import Settings
from dflash_core.errors import RowFailed
from tests.deployments.http_stub import StubBackend, chat, failing
from tests.deployments.test_rpc import context

CHAT = "/v1/chat/completions"
KEY = "key-that-nobody-may-read"
MARKER = "plums-in-the-icebox"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


async def waited(generation: Generation) -> AsyncGenerator[Event, None]:
    """Waits for a quarter of a second, then plays four rounds of 15 drafts, each accepting two."""
    usage = Usage(len(generation.prompt_ids))
    yield Started("w1", "lane-1", 0.25)
    for number in range(1, 5):
        usage = Usage(
            usage.prompt_tokens, 3 * number, rounds=number, drafted=15 * number, accepted=2 * number
        )
        yield TextTokens(MARKER, (1, 2, 3), usage)
    yield Ended("stop", usage)


class Watched(StubBackend):
    """Plays under watch, as the router does."""

    def __init__(self, script: Callable[..., AsyncGenerator[Event, None]] = waited) -> None:
        super().__init__()
        self.script = script
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.watch = Watch(provider.get_tracer("test"), round_every=2)

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        async with aclosing(self.watch.played(generation, super().generate(generation))) as events:
            async for event in events:
                yield event

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def backend() -> Watched:
    return Watched()


class Kept(logging.Handler):
    """Keeps what any logger says."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "dflash")  # other tests may have set up a replica's log
    kept = Kept()
    logging.getLogger().addHandler(kept)
    yield kept.records
    logging.getLogger().removeHandler(kept)


def lines(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    """The access lines as JSON has them."""
    line = Line("json", "replica-1")
    return [json.loads(line.format(record)) for record in records if record.name == "dflash.access"]


async def post(backend: Watched, body: object, path: str = CHAT, **headers: str) -> httpx2.Response:
    app = create_app(backend, api_keys=("another", KEY), watch=backend.watch)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {KEY}", **headers}
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post(path, json=body, headers=headers)


def service(backend: Watched) -> DFlashService:
    return DFlashService(backend, Entrance(backend, Limits(), Access(KeyRing((KEY,)))))


async def call(backend: Watched, prompt: str = "Once", **metadata: str) -> Any:
    asked = context(**{"authorization": f"Bearer {KEY}", **metadata})
    request = pb.GenerateRequest(spec=pb.GenerationSpec(model="stub-model", text=prompt))
    messages = service(backend).generate(request, asked)
    name = "dflash.v1.DFlashService/Generate"
    async for _ in Calls(backend.watch).streamed(name, asked, messages):
        pass
    return asked


async def test_each_request_has_one_line_with_its_figures(backend: Watched, records: list[logging.LogRecord]):
    await post(backend, chat(), **{"x-request-id": "req-1"})
    await call(backend)
    over_http, over_grpc = lines(records)
    assert over_http["message"].startswith(f"POST {CHAT} 200 ")
    assert over_grpc["message"].startswith("RPC dflash.v1.DFlashService/Generate OK ")
    assert (over_http["request_id"], over_grpc["request_id"]) == ("req-1", "r1")
    assert (over_http["key"], over_grpc["key"]) == ("key-2", "key-1")
    for line in (over_http, over_grpc):
        assert (line["rounds"], line["drafted"], line["accepted"]) == (4, 60, 8)
        assert (line["completion_tokens"], line["finish"], line["queue_s"]) == (12, "stop", 0.25)
        assert (line["window"], line["lane"], line["replica"]) == ("w1", "lane-1", "replica-1")
        assert line["prompt_tokens"] > 0
        assert line["seconds"] >= line["ttft_s"] >= 0
    access = next(record for record in records if record.name == "dflash.access")
    text = Line("text", "replica-1").format(access)
    assert text.count(" rounds=4 drafted=60 accepted=8") == text.count(" request_id=req-1 ") == 1
    assert " status=" not in text


async def test_what_fails_has_a_line_with_its_status_and_kind(records: list[logging.LogRecord]):
    backend = Watched(failing(RowFailed("non-finite"), TextTokens("a", (1,), Usage(3, 1))))
    await post(backend, chat(temperature=9))
    await post(backend, chat(), authorization="Bearer nobody")
    await post(backend, chat())
    await post(backend, chat(stream=True))
    await call(backend)
    facts = [(line["status"], line["error"], line.get("finish")) for line in lines(records)]
    assert facts == [
        ("400", "invalid_value", None),
        ("401", "invalid_api_key", None),
        ("500", "row_failed", "error"),
        ("200", "row_failed", "error"),  # the status was out
        ("INTERNAL", "row_failed", "error"),
    ]


async def test_probes_are_no_news(backend: Watched, records: list[logging.LogRecord]):
    app = create_app(backend, watch=backend.watch)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        await client.get("/health")
        await client.get("/console/state")
        await client.get("/v1/models")
    levels = [record.levelno for record in records if record.name == "dflash.access"]
    assert levels == [logging.DEBUG, logging.DEBUG, logging.INFO]
    assert "/health" not in str(backend.spans())


async def test_a_client_that_leaves_is_told_apart(records: list[logging.LogRecord]):
    async def endless(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Started("w1", "lane-1")
        await asyncio.Event().wait()

    backend = Watched(endless)
    app = create_app(backend, watch=backend.watch)
    body = json.dumps(chat()).encode()
    sent = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return next(sent)

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there to hear")

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    ((status, finish),) = [(line["status"], line["finish"]) for line in lines(records)]
    assert (status, finish) == ("499", "abort")
    asked = context(authorization=f"Bearer {KEY}")
    request = pb.GenerateRequest(spec=pb.GenerationSpec(model="stub-model", text="Once"))
    stream = Calls(backend.watch).streamed("s/Generate", asked, service(backend).generate(request, asked))
    await anext(stream)
    await stream.aclose()
    assert lines(records)[-1]["status"] == "CANCELLED"
    assert lines(records)[-1]["finish"] == "abort"


async def test_neither_prompts_answers_nor_keys_are_in_any_line_or_span(records: list[logging.LogRecord]):
    backend = Watched()
    bad = Watched(failing(KeyError(MARKER)))
    tool = {"type": "function", "function": {"name": MARKER, "arguments": "{}"}}
    bodies: list[tuple[Watched, str, Any]] = [
        (backend, CHAT, chat(messages=[{"role": "user", "content": MARKER}], stop=[MARKER], user=MARKER)),
        (backend, CHAT, chat(messages=[{"role": "assistant", "tool_calls": [tool]}], stream=True)),
        (backend, "/v1/completions", {"model": "stub-model", "prompt": MARKER, "echo": True}),
        (backend, "/v1/responses", {"model": "stub-model", "input": MARKER, "instructions": MARKER}),
        (backend, CHAT, chat(messages=MARKER)),
        (backend, CHAT, chat(stop=[MARKER], temperature=9)),
        (backend, CHAT, {"model": MARKER, "messages": [{"role": "user", "content": MARKER}]}),
        (backend, "/tokenize", {"prompt": MARKER}),
        (bad, CHAT, chat()),
        (bad, CHAT, chat(stream=True)),
    ]
    for asked, path, body in bodies:
        await post(asked, body, path)
    await post(backend, chat(), authorization=f"Bearer {KEY}{MARKER}")
    await call(backend, MARKER)
    await call(bad, MARKER)
    assert any(record.exc_info for record in records)
    for form in ("text", "json"):
        written = [Line(form, "r").format(record) for record in records if record.name != "httpx2"]
        assert len(written) > 12
        assert not [line for line in written if MARKER in line or KEY in line]
    told = [span.to_json() for one in (backend, bad) for span in one.exporter.get_finished_spans()]
    assert len(told) > 12
    assert not [span for span in told if MARKER in span or KEY in span]


async def test_a_span_has_phases_and_names_of_the_conventions(backend: Watched):
    body = chat(max_tokens=40, temperature=0.5, top_p=0.9)
    answer = (await post(backend, body, **CALLER, **{"x-request-id": "req-1"})).json()
    found = backend.spans()
    assert found.keys() == {"chat stub-model", "queue", "prefill", "decode"}
    span, queue, prefill, decode = (found[name] for name in ("chat stub-model", "queue", "prefill", "decode"))
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") >= 0  # type: ignore[operator]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dflash",
        "gen_ai.request.model": "stub-model",
        "gen_ai.response.model": "stub-model",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "dflash.rounds": 4,
        "dflash.drafted": 60,
        "dflash.walked": 0,
        "dflash.accepted": 8,
        "dflash.window": "w1",
        "dflash.lane": "lane-1",
        "dflash.request_id": "req-1",
        "dflash.key_id": "key-2",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
    }
    for phase in (queue, prefill, decode):
        assert (phase.parent and phase.parent.span_id) == (span.context and span.context.span_id)
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert [span.status.is_unset, span.kind.name] == [True, "SERVER"]


async def test_every_second_round_is_told_when_asked_so(backend: Watched):
    await post(backend, chat())
    events = backend.spans()["decode"].events
    told = [(dict(event.attributes or {})["dflash.round"], event.name) for event in events]
    assert told == [(2, "round"), (4, "round")]
    assert dict(events[0].attributes or {}) == {
        "dflash.round": 2,
        "dflash.choice": 0,
        "dflash.drafted": 15,
        "dflash.walked": 0,
        "dflash.accepted": 2,
        "dflash.tokens": 3,
    }


async def test_the_callers_trace_goes_on(backend: Watched):
    await post(backend, chat(), **CALLER)
    await call(backend, **CALLER)
    roots = [s for s in backend.exporter.get_finished_spans() if s.name.endswith("stub-model")]
    assert [span.name for span in roots] == ["chat stub-model", "text_completion stub-model"]
    for span in roots:
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    backend.exporter.clear()
    await post(backend, chat(), traceparent=f"00-{TRACE}-{PARENT}-00")  # the caller records nothing
    await post(backend, chat(), traceparent="00-nonsense")
    (root,) = [s for s in backend.exporter.get_finished_spans() if s.name.endswith("stub-model")]
    assert root.parent is None


async def test_a_failed_request_has_a_failed_span(records: list[logging.LogRecord]):
    backend = Watched(failing(RowFailed("non-finite"), Started("w1", "lane-1")))
    await post(backend, chat())
    await post(backend, chat(temperature=9))
    asked = await call(backend)
    assert asked.code() is grpc.StatusCode.INTERNAL
    found = [span for span in backend.exporter.get_finished_spans() if span.kind.name == "SERVER"]
    told = [
        (span.name, span.status.status_code.name, (span.attributes or {})["error.type"]) for span in found
    ]
    assert told == [
        ("chat stub-model", "ERROR", "row_failed"),
        ("POST", "UNSET", "invalid_value"),  # the client's mistake
        ("text_completion stub-model", "ERROR", "row_failed"),
    ]
    assert {"queue", "prefill"} <= backend.spans().keys()
    assert "decode" not in backend.spans()


async def test_without_an_sdk_nothing_is_made_of_a_round(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError("there is nobody to tell")

    monkeypatch.setattr(spans, "Playing", never)
    backend = Watched()
    backend.watch = Watch()
    assert (await post(backend, chat())).status_code == 200


def test_text_lines_say_what_their_message_does_not():
    record = logging.LogRecord("dflash.router", logging.WARNING, "", 0, "window %s broke off", ("w9",), None)
    record.window = "w9"
    line = Line("text", "replica-1").format(record)
    assert line.endswith(" WARNING dflash.router window w9 broke off replica=replica-1")
    told = json.loads(Line("json", "replica-1").format(record))
    assert (told["window"], told["replica"], told["level"]) == ("w9", "replica-1", "WARNING")


def test_logs_go_to_a_file_of_the_replica(tmp_path: Path):
    loggers = [logging.getLogger(name) for name in ("dflash", "deployments")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        write_logs("json", None, "router")
        write_logs("json", tmp_path / "logs", "router")  # in place of the one before
        logging.getLogger("dflash.router").warning("a\nb")
        (file,) = (tmp_path / "logs").iterdir()
        (line,) = file.read_text().splitlines()
        assert (json.loads(line)["message"], file.name) == ("a\nb", "router-router.log")
    finally:
        for logger, level, handlers in before:
            for handler in [h for h in logger.handlers if h not in handlers]:
                logger.removeHandler(handler)
                handler.close()
            logger.setLevel(level)


def test_an_exception_that_may_quote_is_written_without_its_words():
    def logged(error: Exception) -> str:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(Line("text", "r"))
        try:
            raise RuntimeError("outer") from error
        except RuntimeError as outer:
            record = logging.LogRecord(
                "dflash", logging.ERROR, "", 0, "failed", (), (RuntimeError, outer, None)
            )
        handler.emit(record)
        return stream.getvalue()

    assert "builtins.KeyError: (not written" in logged(KeyError(MARKER))
    assert MARKER not in logged(KeyError(MARKER))
    assert "OSError: disk full" in logged(OSError("disk full"))
    assert "builtins.RuntimeError: outer" in logged(OSError("disk full"))


def test_a_trace_endpoint_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    assert not exporting.exporting_to(Settings().trace_endpoint, "r").tracer.start_span("x").is_recording()
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(exporting.NoSdk, match="extra 'trace'"):
        exporting.exporting_to("http://127.0.0.1:4318", "r")


def test_followed_logs_are_shown_line_by_line_over_a_rotation(tmp_path: Path):
    output = io.StringIO()
    follower = Follower(tmp_path, output)
    log = tmp_path / "router-1.log"
    log.write_text("one\ntw")
    follower.show()
    assert output.getvalue() == "one\n"
    with log.open("a") as file:
        file.write("o\nthree\n")
    log.rename(tmp_path / "router-1.log.1")
    log.write_text("four\n")
    follower.show()
    assert output.getvalue() == "one\ntwo\nthree\nfour\n"
    follower.close()


def test_a_folder_of_shown_logs_is_emptied_before_it_goes():
    output = io.StringIO()
    with shown(output) as folder:
        (folder / "target-1.log").write_text("last words\n")
    assert output.getvalue() == "last words\n"
    assert not folder.exists()
