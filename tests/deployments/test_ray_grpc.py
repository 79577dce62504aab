"""gRPC through Ray Serve's own proxy, seen as a client sees it: answers, statuses, metadata, cancelling."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc
import httpx2
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from ray import serve

from deployments import client as rpc
from deployments.app import APP_NAME, assemble
from deployments.client import AsyncClient, CallFailed, Client, ask, conversation
from deployments.endpoints import Endpoints, refuse_others
from deployments.engine import RouterParts
from deployments.generation import Tokenizer
from deployments.proxy import CLIENT_LIMIT_BYTES
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.options import services
from deployments.settings import Settings
from dflash_core.errors import Unavailable
from tests.deployments.conftest import ROOT
from tests.deployments.fake_engine import FAULT, PAIR, FakeEngine, RoundLog, script
from tests.deployments.ray_client import call, wait_until
from tests.deployments.readme import readme

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150), pytest.mark.ray]

SETTINGS = Settings(request_timeout_s=8.0, window_max_age_s=4.0, max_rows=4, max_queue=1, draft_timeout_s=0.5)
SECRET = "pid 4242 at 10.0.0.7 in /srv/secret.py"
BREAKS = "a text that breaks the tokenizer"


class BreakingTokenizer:
    """The real one, with a bug."""

    def __init__(self, real: Tokenizer):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __reduce__(self) -> Any:
        return BreakingTokenizer, (self._real,)

    def encode(self, text: str) -> list[int]:
        if text == BREAKS:
            raise RuntimeError(SECRET)
        return self._real.encode(text)


@dataclass(frozen=True)
class BreakingEngine(FakeEngine):
    def open_router(self, settings: Settings) -> RouterParts:
        parts = super().open_router(settings)
        return replace(parts, tokenizer=BreakingTokenizer(parts.tokenizer))  # type: ignore[arg-type]


def deploy(settings: Settings, log: RoundLog) -> None:
    serve.run(assemble(settings, BreakingEngine(log=log)), name=APP_NAME, route_prefix="/")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RoundLog:
    return RoundLog(tmp_path_factory.mktemp("rounds"))


@pytest.fixture(scope="module")
def app(ray_cluster: int, grpc_port: int, log: RoundLog) -> str:
    deploy(SETTINGS, log)
    return f"127.0.0.1:{grpc_port}"


@pytest.fixture
def pace(app: str, log: RoundLog) -> Iterator[Callable[[float], None]]:
    yield log.set_pace
    log.set_pace(0.02)


@pytest.fixture
def client(app: str) -> Iterator[Client]:
    with Client(app) as client:
        yield client


def ids_of(events: "list[rpc.RpcEvent]") -> list[int]:
    return [token.id for event in events if isinstance(event, pb.Tokens) for token in event.tokens]


def expected(prompt: tuple[int, ...], num: int) -> list[int]:
    return [script(prompt, len(prompt) + i) for i in range(num)]


def endless(max_tokens: int = 2000, **fields: Any) -> pb.GenerationSpec:
    return ask("demo", [5, 6, max_tokens], max_tokens=max_tokens, **fields)


def failure(work: Callable[[], object]) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        work()
    return caught.value


def once(client: Client, spec: pb.GenerationSpec) -> object:
    return client.generate_once(spec)


def streamed(client: Client, spec: pb.GenerationSpec) -> object:
    return list(client.generate(spec))


BOTH = pytest.mark.parametrize("way", [once, streamed])


def test_a_stream_starts_brings_tokens_of_both_origins_and_finishes(client: Client) -> None:
    prompt = (7, 8, 9)
    events = list(client.generate(ask("demo", prompt, max_tokens=21)))
    started, *tokens, finished = events
    assert isinstance(started, pb.Started)
    assert (started.model, started.prompt_tokens) == ("demo", 3)
    assert started.window
    assert started.lane
    assert all(isinstance(event, pb.Tokens) for event in tokens)
    assert ids_of(events) == expected(prompt, 21)
    assert isinstance(finished, pb.Finished)
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (3, 21)
    origins = [token.origin for event in tokens if isinstance(event, pb.Tokens) for token in event.tokens]
    assert origins.count(pb.TOKEN_ORIGIN_ACCEPTED) == finished.speculation.accepted > 0
    assert origins.count(pb.TOKEN_ORIGIN_BONUS) == 21 - finished.speculation.accepted
    assert finished.speculation.drafted >= finished.speculation.walked >= finished.speculation.accepted


def test_the_answer_in_one_message_is_the_stream_collected(client: Client) -> None:
    spec = ask("demo", conversation(("user", "Where is Haiti?")), max_tokens=12)
    spec.stopping.ignore_eos = True
    events = list(client.generate(spec))
    whole = client.generate_once(spec)
    text = "".join(event.text for event in events if isinstance(event, pb.Tokens))
    assert (ids_of([whole.tokens]), whole.tokens.text) == (ids_of(events), text)
    assert whole.finished == events[-1]
    assert whole.started.id != getattr(events[0], "id", whole.started.id)


def test_text_and_chat_and_ids_of_the_same_prompt_give_the_same_tokens(client: Client) -> None:
    from dflash_core.text.tokenizer import Tokenizer as RealTokenizer

    tokenizer = RealTokenizer.load(PAIR / "target")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat_ids = tuple(tokenizer.apply_chat(messages))
    turns = conversation(("system", "Be brief."), ("user", "Hi"))
    assert ids_of([client.generate_once(ask("demo", turns, max_tokens=9)).tokens]) == expected(chat_ids, 9)
    text_ids = tuple(tokenizer.encode("Once upon"))
    by_text = client.generate_once(ask("demo", "Once upon", max_tokens=9))
    assert ids_of([by_text.tokens]) == expected(text_ids, 9)


async def test_the_async_client_sees_the_same(app: str) -> None:
    spec = ask("demo", [3, 1], max_tokens=10)
    async with AsyncClient(app) as client:
        events = [event async for event in client.generate(spec)]
        whole = await client.generate_once(spec)
        models = await client.models()
        with pytest.raises(CallFailed) as caught:
            await client.generate_once(ask("nobody", "x"))
    assert ids_of(events) == ids_of([whole.tokens]) == expected((3, 1), 10)
    assert [model.name for model in models] == ["dflash-embedded", "demo"]
    assert (caught.value.code, caught.value.kind) == (StatusCode.NOT_FOUND, "model_not_found")


def test_models_and_statistics_tell_what_is_served_and_done(client: Client) -> None:
    first, alias = client.models()
    assert (first.name, alias.name, alias.root) == ("dflash-embedded", "demo", "dflash-embedded")
    assert (first.max_context, first.block_size) == (4096, 4)
    assert first.defaults.HasField("temperature")
    before = client.stats()
    client.generate_once(ask("demo", [4, 4], max_tokens=11))
    after = client.stats()
    assert after.state == pb.SERVER_STATE_OK
    assert after.generated_tokens == before.generated_tokens + 11
    assert after.finished["length"] == before.finished["length"] + 1
    assert after.speculation.accepted > before.speculation.accepted
    assert after.version


@BOTH
@pytest.mark.parametrize(
    ("spec", "code", "kind", "param"),
    [
        (ask("nobody", "x"), StatusCode.NOT_FOUND, "model_not_found", "spec.model"),
        (pb.GenerationSpec(model="demo"), StatusCode.INVALID_ARGUMENT, "invalid_request", "spec.prompt"),
        (ask("demo", "x", max_tokens=0), StatusCode.INVALID_ARGUMENT, "invalid_request", "spec.max_tokens"),
        (ask("demo", [1] * 5000), StatusCode.INVALID_ARGUMENT, "context_length_exceeded",
         "spec.token_ids.ids"),
        (ask("demo", [10**9]), StatusCode.INVALID_ARGUMENT, "invalid_request", "spec.token_ids.ids[0]"),
        (ask("demo", BREAKS), StatusCode.INTERNAL, "internal_error", None),
    ],
)  # fmt: skip
def test_what_is_wrong_before_the_first_message_is_a_status_with_kind_and_field(
    client: Client,
    way: Callable[..., object],
    spec: pb.GenerationSpec,
    code: StatusCode,
    kind: str,
    param: str | None,
) -> None:
    error = failure(lambda: way(client, spec))
    assert (error.code, error.kind, error.param) == (code, kind, param)
    assert error.request_id
    if kind == "internal_error":
        assert error.request_id in error.details
    assert not re.search(r"Traceback|\.py|pid|4242|10\.0\.0\.7|/srv|0x", error.details + str(error.__dict__))


@BOTH
def test_a_row_that_fails_after_its_first_message_ends_with_a_status(
    client: Client, way: Callable[..., object]
) -> None:
    error = failure(lambda: way(client, ask("demo", [5, FAULT], max_tokens=50)))
    assert (error.code, error.kind) == (StatusCode.INTERNAL, "row_failed")
    assert error.details == "the row went wrong"


def test_the_events_before_a_failure_come_and_nothing_stands_for_the_failure(client: Client) -> None:
    stream = client.generate(ask("demo", [6, FAULT], max_tokens=50))
    events: list[rpc.RpcEvent] = []
    with pytest.raises(CallFailed):
        events.extend(stream)
    assert isinstance(events[0], pb.Started)
    assert len(events) > 1
    assert all(isinstance(event, pb.Tokens) and event.tokens for event in events[1:])


@pytest.fixture
async def busy(app: str, pace: Callable[[float], None]) -> AsyncIterator[AsyncClient]:
    """All rows taken and the queue full, by requests that take long."""
    pace(0.1)
    async with AsyncClient(app) as client:
        tasks: list[asyncio.Task[list[rpc.RpcEvent]]] = []
        for number in range(SETTINGS.max_rows + SETTINGS.max_queue):  # one by one: none meets a full queue
            tasks.append(asyncio.create_task(read(client, endless(900 + number))))
            await eventually(lambda: num_inside() == len(tasks))
        yield client
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: call("Target", "stats")["rows"] == 0)
    await eventually(lambda: call("Router", "health")["waiting"] == 0)


def num_inside() -> int:
    health = call("Router", "health")
    return health["running"] + health["waiting"]


async def read(
    client: AsyncClient, spec: pb.GenerationSpec, timeout_s: float | None = None
) -> "list[rpc.RpcEvent]":
    return [event async for event in client.generate(spec, timeout_s=timeout_s)]


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s)


async def test_a_full_queue_is_resource_exhausted_and_says_when_to_come_again(busy: AsyncClient) -> None:
    with pytest.raises(CallFailed) as by_stream:
        await read(busy, endless(1234))
    with pytest.raises(CallFailed) as by_once:
        await busy.generate_once(endless(1234))
    for error in (by_stream.value, by_once.value):
        assert (error.code, error.kind) == (StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        assert error.retry_after is not None
        assert error.retry_after >= 1


@pytest.mark.usefixtures("busy")
async def test_http_and_grpc_share_one_queue(ray_cluster: int) -> None:
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 4}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ray_cluster}") as client:
        refused = await client.post("/v1/completions", json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1


async def test_a_request_that_takes_too_long_for_the_server_is_deadline_exceeded(
    app: str, pace: Callable[[float], None]
) -> None:
    pace(0.2)
    async with AsyncClient(app) as client:
        calls = read(client, endless(700)), client.generate_once(endless(701))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, CallFailed)
        assert (error.code, error.kind) == (StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
        assert error.details == "not finished within 8 seconds"


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_cancelled_or_late_call_plays_at_most_one_more_round(
    app: str, log: RoundLog, pace: Callable[[float], None], how: str, is_stream: bool
) -> None:
    pace(0.3)  # a round; a departure that takes longer to reach the target would be a fault of ours
    stays, leaves = (401, 403) if is_stream else (405, 407)
    leaves += 50 * (how == "deadline")

    def rounds_of(budget: int, since: float = 0.0) -> int:
        return sum(began > since and budget in budgets for began, budgets in log.rounds())

    async with AsyncClient(app) as client:
        staying = asyncio.create_task(read(client, endless(stays)))
        await eventually(lambda: rounds_of(stays) >= 1)
        spec, timeout_s = endless(leaves), 1.5 if how == "deadline" else None
        if is_stream:
            leaving = asyncio.create_task(read(client, spec, timeout_s))
        else:
            leaving = asyncio.create_task(client.generate_once(spec, timeout_s=timeout_s))
        await eventually(lambda: rounds_of(leaves) >= 2)
        if how == "cancel":
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        else:
            with pytest.raises(CallFailed) as late:
                await leaving
            assert (late.value.code, late.value.kind) == (StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
        left_at = time.monotonic()
        await eventually(lambda: rounds_of(stays, left_at) >= 4)  # the other row plays on
        assert rounds_of(leaves, left_at) <= 1
        pace(0.005)
        assert ids_of(await staying) == expected((5, 6, stays), stays)
    await eventually(lambda: call("Target", "stats")["rows"] == 0)


def test_leaving_the_loop_over_a_stream_frees_its_row_time_after_time(
    client: Client, pace: Callable[[float], None]
) -> None:
    """Ray cancels what a cancelled call has called: a window's mail must not be among it."""
    pace(0.05)
    for number in range(8):
        stream = client.generate(endless(2000 + number))
        assert isinstance(next(stream), pb.Started)
        assert isinstance(next(stream), pb.Tokens)
        stream.close()
        wait_until(lambda: call("Target", "stats")["rows"] == 0, 20)


@BOTH
def test_a_prompt_of_five_megabytes_is_too_long_and_one_beyond_the_limit_is_too_large(
    client: Client, way: Callable[..., object]
) -> None:
    five = failure(lambda: way(client, ask("demo", "word " * 2**20)))
    assert (five.code, five.kind) == (StatusCode.INVALID_ARGUMENT, "context_length_exceeded")
    assert "This model's context is 4096 tokens" in five.details
    beyond = failure(lambda: way(client, ask("demo", "x" * (SETTINGS.max_body_bytes + 1))))
    assert (beyond.code, beyond.kind) == (StatusCode.RESOURCE_EXHAUSTED, "payload_too_large")
    assert f"the limit is {SETTINGS.max_body_bytes}" in beyond.details


def test_a_message_far_beyond_the_limit_ends_at_the_proxy_without_being_read(client: Client) -> None:
    """Whoever may connect could fill the memory otherwise: keys and sizes are the router's to check."""
    assert rpc.MAX_RECEIVED_BYTES == CLIENT_LIMIT_BYTES > 4 * Settings().max_body_bytes
    error = failure(lambda: client.generate_once(ask("demo", "x" * CLIENT_LIMIT_BYTES)))
    assert (error.code, error.kind) == (StatusCode.RESOURCE_EXHAUSTED, "message_too_large")
    assert "Received message larger than max" in error.details
    assert ids_of([client.generate_once(ask("demo", [5, 6], max_tokens=9)).tokens]) == expected((5, 6), 9)


def test_an_answer_beyond_what_the_client_receives_is_too_large_in_one_message_and_streams(app: str) -> None:
    spec = ask("demo", [6, 6], max_tokens=200)
    with Client(app, max_received_bytes=400) as client:
        error = failure(lambda: client.generate_once(spec))
        assert (error.code, error.kind) == (StatusCode.RESOURCE_EXHAUSTED, "message_too_large")
        assert "larger than max" in error.details
        assert len(ids_of(list(client.generate(spec)))) == 200


def test_health_is_told_once_and_watched(app: str) -> None:
    with grpc.insecure_channel(app) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "dflash.v1.DFlashService"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
        assert unknown.value.code() == StatusCode.NOT_FOUND
        states = stub.List(cast(Any, health_pb2).HealthListRequest()).statuses
        assert {service: state.status for service, state in states.items()} == dict.fromkeys(
            ("", *services()), serving
        )
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == serving
        with pytest.raises(grpc.RpcError) as over:  # so that nobody holds up a replica that drains
            next(watch)
        assert over.value.code() == StatusCode.UNAVAILABLE
        nothing = stub.Watch(health_pb2.HealthCheckRequest(service="nothing"))
        assert next(nothing).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        nothing.cancel()


def test_reflection_lists_our_services(app: str) -> None:
    with grpc.insecure_channel(app) as channel:
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"dflash.v1.DFlashService", "grpc.health.v1.Health"} <= set(names)


def own_address() -> str:
    """An address of this machine that is not loopback; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return probe.getsockname()[0]


def test_a_running_serve_is_joined_at_its_own_port_and_refused_at_another(
    app: str, ray_cluster: int, grpc_port: int
) -> None:
    from ray.serve.context import _get_global_client

    serving = _get_global_client()
    assert serving is not None
    found = Endpoints.found(serving)
    ours = SETTINGS.model_copy(update={"http_port": ray_cluster, "grpc_port": grpc_port})
    refuse_others(found, Endpoints.wanted(ours))
    with pytest.raises(Unavailable, match=f"gRPC on port {grpc_port} .* gRPC on port 9 "):
        refuse_others(found, Endpoints.wanted(ours.model_copy(update={"grpc_port": 9})))


def test_the_readmes_example_prints_the_answer(app: str, client: Client) -> None:
    program = readme("python", "AsyncClient").replace("127.0.0.1:9000", app)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    asked = ask("demo", conversation(("user", "What is the capital of France?")), max_tokens=40)
    assert done.stdout == client.generate_once(asked).tokens.text


def test_the_readmes_buf_curl_line_streams_the_answer(app: str) -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not installed (it comes with make check)")
    line = readme("", "buf curl").replace("127.0.0.1:9000", app).replace("buf curl", f"{buf} curl", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    messages = [json.loads(part) for part in re.split(r"\n(?=\{)", done.stdout.strip())]
    assert "started" in messages[0]
    assert sum(len(message.get("tokens", {}).get("tokens", ())) for message in messages) == 40
    assert messages[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"


@BOTH
def test_without_keys_a_caller_from_elsewhere_is_unauthenticated(
    app: str, grpc_port: int, way: Callable[..., object]
) -> None:
    with Client(f"{own_address()}:{grpc_port}") as stranger:
        error = failure(lambda: way(stranger, ask("demo", "x", max_tokens=1)))
        assert (error.code, error.kind) == (StatusCode.UNAUTHENTICATED, "invalid_api_key")
        assert failure(stranger.models).kind == failure(stranger.stats).kind == "invalid_api_key"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the application with a key writes its lines."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def keyed(app: str, log: RoundLog, logs: Path) -> str:
    """The application with a key; from here on in this module."""
    file = logs / "keys"
    file.write_text("# ours\nopen-sesame\n")
    changes = {"api_keys_file": file, "log_dir": logs, "log_format": "json"}
    deploy(SETTINGS.model_copy(update=changes), log)
    return app


@BOTH
def test_with_keys_a_call_needs_one_wherever_it_comes_from(
    keyed: str, grpc_port: int, way: Callable[..., object]
) -> None:
    spec = ask("demo", "x", max_tokens=1)
    for key in (None, "open-sesam", ""):
        with Client(keyed, api_key=key) as client:
            error = failure(lambda client=client: way(client, spec))
            assert (error.code, error.kind) == (StatusCode.UNAUTHENTICATED, "invalid_api_key")
            assert "sesam" not in error.details
            assert failure(client.models).kind == failure(client.stats).kind == "invalid_api_key"
    for address in (keyed, f"{own_address()}:{grpc_port}"):
        with Client(address, api_key="open-sesame") as client:
            assert way(client, spec)
            assert client.models()


def test_with_keys_health_still_needs_none(keyed: str) -> None:
    with grpc.insecure_channel(keyed) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(health_pb2.HealthCheckRequest()).status
    assert status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("service", services())
def test_bytes_that_are_no_message_need_a_key_too_and_are_logged_under_the_called_service(
    keyed: str, logs: Path, service: str
) -> None:
    with grpc.insecure_channel(keyed) as channel:
        generate = channel.unary_stream(f"/{service}/Generate")
        for key, code in (("none", StatusCode.UNAUTHENTICATED), ("open-sesame", StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.RpcError) as refused:
                list(generate(b"\xff", metadata=(("authorization", f"Bearer {key}"),)))
            assert refused.value.code() == code

    def statuses() -> list[str]:
        written = [line for file in logs.glob("router-*.log") for line in file.read_text().splitlines()]
        lines = [json.loads(line) for line in written]
        return [line["status"] for line in lines if line.get("path") == f"{service}/Generate"]

    wait_until(lambda: {"UNAUTHENTICATED", "INVALID_ARGUMENT"} <= set(statuses()), 10)


def test_the_routers_log_has_one_line_for_each_call_and_neither_key_nor_text(
    keyed: str, ray_cluster: int, logs: Path
) -> None:
    spec = ask("demo", "a prompt of plums", max_tokens=9)
    with Client(keyed, api_key="open-sesame") as client:
        client.generate_once(spec)
        list(client.generate(spec))
    body = {"model": "demo", "prompt": "a prompt of plums", "max_tokens": 9}
    headers = {"authorization": "Bearer open-sesame", "x-request-id": "plain-7"}
    httpx2.post(f"http://127.0.0.1:{ray_cluster}/v1/completions", json=body, headers=headers)

    def written() -> list[str]:
        return [line for file in logs.glob("router-*.log") for line in file.read_text().splitlines()]

    def accesses() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in written()]
        return [line for line in lines if line.get("completion_tokens") == 9]

    wait_until(lambda: len(accesses()) == 3, 10)
    assert [(line["path"].rpartition("/")[2], line["status"]) for line in accesses()] == [
        ("GenerateOnce", "OK"),
        ("Generate", "OK"),
        ("completions", "200"),
    ]
    assert accesses()[2]["request_id"] == "plain-7"
    assert all(line["key"] == "key-1" and line["window"] and line["lane"] for line in accesses())
    assert not [line for line in written() if "plums" in line or "sesam" in line]
