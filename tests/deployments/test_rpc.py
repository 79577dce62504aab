"""The gRPC edge without Ray: requests, answers, statuses and access, with a context of the proxy's making."""

import asyncio
import math
import pickle
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc import StatusCode
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve.grpc_util import RayServegRPCContext

from deployments.client import ask, conversation
from deployments.generation import Event, Generation, Started, TextTokens, Usage
from deployments.ingress import Ingress
from deployments.keys import KeyRing, keys_of, read_keys
from deployments.openai.errors import InvalidApiKey
from deployments.openai.grammar import grammar_of
from deployments.openai.limits import Limits
from deployments.openai.prepare import prepare
from deployments.openai.schema import ChatRequest, CompletionRequest
from deployments.rpc import options
from deployments.rpc.access import Access, is_loopback
from deployments.rpc.answers import Answer
from deployments.rpc.boundary import answered, streamed
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.entrance import Entrance
from deployments.rpc.health import Health
from deployments.rpc.requests import parse
from deployments.rpc.service import DFlashService
from deployments.rpc.servicers import Unreadable
from deployments.rpc.status import CODES, ClosingStatus, set_failure
from deployments.settings import SettingsError, load_settings
from deployments.telemetry import Statistics
from deployments.ticket import Ticket
from dflash_core import errors
from dflash_core.errors import DFlashError, InvalidRequest
from dflash_core.text.stream import TextStream
from tests.deployments.http_stub import StubBackend, failing, number, tokenizer, two_rounds

SECRET = "pid 4242 at 10.0.0.7 in /srv/secret.py"


def context(peer: str = "ipv4:127.0.0.1:5000", **metadata: str) -> RayServegRPCContext:
    """What the proxy makes of a call and sends along."""
    raw = Mock()
    raw.invocation_metadata.return_value = list(metadata.items())
    raw.trailing_metadata.return_value = [("request_id", "r1")]
    raw.peer.return_value = peer
    raw.code.return_value = None
    raw.details.return_value = ""
    return RayServegRPCContext(raw)


def service(backend: StubBackend, keys: tuple[str, ...] = ()) -> DFlashService:
    return DFlashService(backend, Entrance(backend, Limits(), Access(KeyRing(keys))))


def spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(model="stub-model", **{"text": "Once", **fields})


async def played(backend: StubBackend, asked: RayServegRPCContext) -> list[Any]:
    request = pb.GenerateRequest(spec=spec())
    return [message async for message in streamed(asked, service(backend).generate(request, asked))]


def test_messages_pickle_under_their_own_module() -> None:
    request = pb.GenerateRequest(spec=spec(max_tokens=3))
    assert type(request).__module__ == "deployments.rpc.dflash.v1.dflash_pb2"
    assert pickle.loads(pickle.dumps(request)) == request


def test_smgs_messages_pickle_although_their_module_does_not_exist() -> None:
    from deployments.rpc.mlx_messages import common
    from deployments.rpc.mlx_messages import pb as mlx

    request = mlx.GenerateRequest(request_id="a", tokenized=mlx.TokenizedInput(input_ids=[1, 2]))
    for message in (request, common.GetTokenizerRequest(), mlx.AbortRequest(request_ids=["a"])):
        assert pickle.loads(pickle.dumps(message)) == message


def mlx_engine(backend: StubBackend, keys: tuple[str, ...] = ()) -> Any:
    from deployments.rpc.mlx_engine import MlxEngine

    return MlxEngine(backend, Entrance(backend, Limits(), Access(KeyRing(keys))), Path)


def mlx_request(name: str) -> Any:
    from deployments.rpc.mlx_messages import pb as mlx

    return mlx.GenerateRequest(request_id=name, tokenized=mlx.TokenizedInput(input_ids=[1, 2]))


async def test_a_stranger_takes_no_request_id_of_smgs() -> None:
    engine = mlx_engine(StubBackend(), ("right",))
    ours = {"authorization": "bearer right"}
    running = engine.generate(mlx_request("a"), context(**ours))
    await anext(running)
    with pytest.raises(InvalidApiKey):
        await anext(engine.generate(mlx_request("a"), context()))
    assert (await engine.server_info(context(**ours))).active_requests == 1
    await running.aclose()


async def test_a_request_id_of_smgs_that_runs_is_refused_and_the_running_call_goes_on() -> None:
    engine = mlx_engine(StubBackend())
    first = engine.generate(mlx_request("a"), context())
    await anext(first)
    with pytest.raises(InvalidRequest, match="running call") as refused:
        await anext(engine.generate(mlx_request("a"), context()))
    assert refused.value.param == "request_id"
    assert (await engine.server_info(context())).active_requests == 1
    await first.aclose()
    assert [m async for m in engine.generate(mlx_request("a"), context())]  # free again
    with pytest.raises(InvalidRequest, match="empty"):
        await anext(engine.generate(mlx_request(""), context()))


def test_no_method_name_occurs_in_two_services_but_generate_and_each_has_its_handler() -> None:
    """Serve's proxy calls by the bare name, so two services with one name would call one handler."""
    import grpc_health.v1.health_pb2
    import smg_grpc_proto.generated.mlx_engine_pb2

    assert grpc_health.v1.health_pb2
    assert smg_grpc_proto.generated.mlx_engine_pb2
    pool = descriptor_pool.Default()
    methods = [
        method
        for name in (options.OUR_SERVICE, options.MLX_SERVICE, "grpc.health.v1.Health")
        for method in pool.FindServiceByName(name).methods
    ]
    names = [method.name for method in methods]
    assert {name for name in names if names.count(name) > 1} == {"Generate"}
    inputs = [method.input_type.full_name for method in methods if method.name == "Generate"]
    assert inputs == ["dflash.v1.GenerateRequest", "mlx.grpc.engine.GenerateRequest"]
    assert all(callable(getattr(Ingress, name)) for name in names)


def test_everything_that_a_client_may_say_reaches_the_schema() -> None:
    asked = spec(max_tokens=7)
    asked.sampling.MergeFrom(pb.Sampling(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=2**64 - 1))
    asked.stopping.MergeFrom(pb.Stopping(strings=["a", "b"], token_ids=[5], ignore_eos=True))
    parsed = parse(asked)
    assert isinstance(parsed, CompletionRequest)
    assert (parsed.prompt, parsed.max_tokens) == ("Once", 7)
    assert (parsed.temperature, parsed.top_p, parsed.top_k, parsed.min_p) == (0.5, 0.9, 3, 0.1)
    assert parsed.seed == 2**64 - 1
    assert (parsed.stop, parsed.stop_token_ids, parsed.ignore_eos) == (["a", "b"], [5], True)


async def test_a_structure_is_a_grammar_and_one_that_cannot_be_followed_is_named() -> None:
    entrance = Entrance(StubBackend(), Limits(), Access(KeyRing(())))
    structures = (
        pb.Structure(json='{"type": "integer"}'),
        pb.Structure(regex="a+"),
        pb.Structure(choice=pb.Texts(texts=["a", "b"])),
        pb.Structure(grammar='start: "a"'),
    )
    for structure in structures:
        parsed = parse(ask("stub-model", "Once", structure=structure))
        generation = await entrance.prepare(parsed, 9, context())
        assert generation.grammar == (grammar_of(parsed, (), tokenizer()) or (None,))[0]
        assert generation.grammar is not None
    asked = context()
    bad = pb.GenerateRequest(spec=spec(structure=pb.Structure(regex="(a")))
    with pytest.raises(InvalidRequest, match=r"Invalid 'spec.structure.regex'.*unclosed") as caught:
        _ = [message async for message in service(StubBackend()).generate(bad, asked)]
    assert caught.value.param == "spec.structure.regex"


def test_zero_is_a_value_and_absence_is_the_default() -> None:
    zero = parse(spec(sampling=pb.Sampling(temperature=0, top_p=0, top_k=0, min_p=0, seed=0)))
    assert (zero.temperature, zero.top_p, zero.top_k, zero.min_p, zero.seed) == (0, 0, 0, 0, 0)
    absent = parse(spec())
    assert {absent.temperature, absent.top_p, absent.top_k, absent.min_p, absent.seed} == {None}


def test_a_conversation_keeps_its_roles_tools_and_template_arguments() -> None:
    chat = conversation(("system", "Be brief."), ("developer", "Truly."), ("user", "Hi"))
    call = pb.ToolCall(id="c1", name="add", arguments='{"a": 1}')
    chat.messages.add(role=pb.ROLE_ASSISTANT, tool_calls=[call], reasoning_content="so")
    chat.messages.add(role=pb.ROLE_TOOL, content="2", tool_call_id="c1")
    tool = chat.tools.add(name="add", description="adds")
    tool.parameters = '{"type": "object", "required": ["b", "a"], "minimum": 3, "b": {}, "a": {}}'
    chat.template_arguments = '{"enable_thinking": false}'
    parsed = parse(ask("stub-model", chat))
    assert isinstance(parsed, ChatRequest)
    plain = [message.model_dump(exclude_none=True) for message in parsed.messages]
    assert [message["role"] for message in plain] == ["system", "developer", "user", "assistant", "tool"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert plain[3]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert parsed.tools is not None
    written = {"type": "object", "required": ["b", "a"], "minimum": 3, "b": {}, "a": {}}
    assert repr(parsed.tools[0].function.parameters) == repr(written)
    assert parsed.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (pb.GenerationSpec(text="x"), "spec.model"),
        (spec(max_tokens=2**32 - 1), "spec.max_tokens"),
        (spec(sampling=pb.Sampling(temperature=2.5)), "spec.sampling.temperature"),
        (spec(sampling=pb.Sampling(top_p=math.nan)), "spec.sampling.top_p"),
        (spec(stopping=pb.Stopping(strings=[""])), "spec.stopping.strings[0]"),
        (spec(stopping=pb.Stopping(strings=["x"] * 17)), "spec.stopping.strings"),
        (spec(logprobs=pb.Logprobs(top=21)), "spec.logprobs.top"),
        (pb.GenerationSpec(model="m", logprobs=pb.Logprobs(top=21), chat=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_USER, content="x")])), "spec.logprobs.top"),
        (spec(sampling=pb.Sampling(presence_penalty=2.5)), "spec.sampling.presence_penalty"),
        (spec(structure=pb.Structure()), "spec.structure"),
        (spec(structure=pb.Structure(choice=pb.Texts())), "spec.structure.choice"),
        (pb.GenerationSpec(model="m", token_ids=pb.TokenIds()), "spec.token_ids.ids"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation()), "spec.chat.messages"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(messages=[pb.Message(content="x")])),
         "spec.chat.messages[0].role"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER)])),
         "spec.chat.messages[0].content"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(messages=[
            pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="f", arguments="[")])])),
         "spec.chat.messages[0].tool_calls[0].arguments"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_USER, content="x")], tools=[pb.Function()])),
         "spec.chat.tools[0].name"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_USER, content="x")],
            tools=[pb.Function(name="f", parameters="[1]")])),
         "spec.chat.tools[0].parameters"),
        (pb.GenerationSpec(model="m", chat=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_USER, content="x")], template_arguments="{")),
         "spec.chat.template_arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_field_as_the_proto_does(asked: pb.GenerationSpec, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(asked)
    assert caught.value.param == param
    assert f"'{param}'" in str(caught.value)


def test_a_role_of_tomorrow_is_refused_by_name() -> None:
    message = pb.Message(content="x")
    message.MergeFromString(b"\x08\x63")  # role 99
    with pytest.raises(InvalidRequest) as caught:
        parse(pb.GenerationSpec(model="m", chat=pb.Conversation(messages=[message])))
    assert caught.value.param == "spec.chat.messages[0].role"


@pytest.mark.parametrize("top", [None, 2])
async def test_tokens_tell_their_log_probabilities_if_asked(top: int | None) -> None:
    chat = pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="x")])
    for asked in (spec(), pb.GenerationSpec(model="stub-model", chat=chat)):
        asked.logprobs.CopyFrom(pb.Logprobs(top=top))
        generation = prepare(parse(asked), StubBackend(), Limits(), "request-1")
        answer = Answer(generation)
        async for event in two_rounds(generation):
            answer.add(event)
        tokens = answer.whole.tokens.tokens
        assert [token.logprob for token in tokens] == [-i / 8 for i in (11, 12, 13, 14, 15)]
        for token in tokens:
            told = [(other.id, other.logprob) for other in token.top_logprobs]
            assert told == list(number(token.id, top or 0).top)


async def test_tokens_tell_accepted_drafts_from_the_targets_own() -> None:
    async def script(generation: Generation) -> AsyncGenerator[Event, None]:
        yield Started("w", "l")
        first = Usage(1, 3, rounds=1, drafted=7, walked=1, accepted=1)
        yield TextTokens("a", (11, 20, 21), first, num_first=1)  # the prompt's, and the first round's
        yield TextTokens("b", (12, 13, 14), Usage(1, 6, rounds=2, drafted=14, walked=3, accepted=3))
        yield TextTokens("", (15, 16), Usage(1, 8, rounds=3, drafted=21, walked=6, accepted=6))  # cut
        async for event in two_rounds(generation):
            if not isinstance(event, Started | TextTokens):
                yield event

    backend = StubBackend()
    backend.script = script
    messages = await played(backend, context())
    origins = [[token.origin for token in message.tokens.tokens] for message in messages[1:4]]
    accepted, bonus = pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_BONUS
    assert origins == [[bonus, accepted, bonus], [accepted, accepted, bonus], [accepted, accepted]]
    assert messages[4].finished.reason == pb.FINISH_REASON_STOP
    assert messages[4].finished.WhichOneof("stop") is None


EVERY_KIND = [
    error("what went wrong")
    for error in (
        errors.InvalidRequest, errors.ContextLengthExceeded, errors.QueueFull, errors.DeadlineExceeded,
        errors.Unavailable, errors.LaneFull, errors.WindowLost, errors.RowFailed,
    )
]  # fmt: skip


@pytest.mark.parametrize("error", EVERY_KIND, ids=lambda error: error.kind)
@pytest.mark.parametrize("events", [(), (Started("w", "l"), TextTokens("a", (1,), Usage(1, 1)))])
async def test_each_kind_has_its_code_details_and_metadata(
    error: DFlashError, events: tuple[Event, ...]
) -> None:
    backend, asked = StubBackend(), context()
    backend.script = failing(error, *events)
    messages = await played(backend, asked)
    assert len(messages) == len(events) + 1
    assert isinstance(messages[-1], ClosingStatus)
    assert (asked.code(), asked.details()) == (CODES[error.kind], "what went wrong")
    trailing = dict(asked.trailing_metadata())
    assert trailing["error-kind"] == error.kind
    assert trailing["request_id"] == "r1"
    may_be_tried_again = CODES[error.kind] in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
    assert ("retry-after" in trailing) == may_be_tried_again


@pytest.mark.parametrize("events", [(), (Started("w", "l"), TextTokens("a", (1,), Usage(1, 1)))])
async def test_a_fault_of_ours_shows_nothing_but_the_request_id(
    events: tuple[Event, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for error in (RuntimeError(SECRET), errors.CheckpointError(SECRET), DFlashError(SECRET)):
        backend, asked = StubBackend(), context()
        backend.script = failing(error, *events)
        await played(backend, asked)
        shown = f"{asked.details()} {asked.trailing_metadata()}"
        assert asked.code() == StatusCode.INTERNAL
        assert "request id r1" in asked.details()
        assert ("error-kind", "internal_error") in asked.trailing_metadata()
        assert not re.search(r"Traceback|\.py|4242|10\.0\.0\.7|/srv", shown)
        assert SECRET in caplog.text  # our log has it


def test_details_and_metadata_fit_the_headers_that_clients_take() -> None:
    asked = context()
    set_failure(asked, InvalidRequest("ж" * 10_000, param="ж" * 10_000))
    sent = sum(len(key) + len(value) for key, value in asked.trailing_metadata())
    assert sent + 3 * len(asked.details().encode()) < 8 * 1024


@pytest.mark.parametrize(
    ("peer", "keys", "name"),
    [
        ("ipv4:127.0.0.1:5000", (), "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", (), "::1"),
        ("unix:/tmp/socket", (), ""),
        ("ipv4:10.0.0.7:5000", ("left", "right"), "key-2"),
    ],
)
async def test_a_call_is_known_by_its_key_else_by_its_peers_address(
    peer: str, keys: tuple[str, ...], name: str
) -> None:
    backend = StubBackend()
    asked = context(peer, authorization="Bearer right")
    await anext(service(backend, keys).generate(pb.GenerateRequest(spec=spec()), asked))
    assert backend.last.client == name


@pytest.mark.parametrize(
    ("peer", "is_ours"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.8.9.1:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True),
        ("unix:/run/x", True),
        ("ipv4:10.0.0.7:5000", False),
        ("ipv6:[::ffff:10.0.0.7]:5000", False),
        ("ipv6:[fe80::1%25eth0]:5000", False),
        ("ipv4:0.0.0.0:5000", False),
        ("dns:localhost:5000", False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(peer: str, is_ours: bool) -> None:
    assert is_loopback(peer) is is_ours


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic right", "right"])
async def test_with_keys_even_this_machine_needs_one(given: str) -> None:
    backend = StubBackend()
    asked = context(authorization=given) if given else context()
    request = pb.GenerateOnceRequest(spec=spec())
    await answered(asked, service(backend, ("right",)).generate_once(request, asked))
    assert asked.code() == StatusCode.UNAUTHENTICATED
    assert not backend.generations
    asked = context("ipv4:10.0.0.7:5", authorization="bearer right")
    await answered(asked, service(backend, ("right",)).generate_once(request, asked))
    assert asked.code() is None
    assert len(backend.generations) == 1


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}])
async def test_with_keys_a_stranger_hears_of_the_key_whatever_he_sends(given: dict[str, str]) -> None:
    garbled, keys = cast(Any, Unreadable(options.OUR_SERVICE)), ("right",)
    ours, smgs = service(StubBackend(), keys), mlx_engine(StubBackend(), keys)
    calls: tuple[Callable[[RayServegRPCContext], Any], ...] = (
        lambda asked: anext(ours.generate(garbled, asked)),
        lambda asked: ours.generate_once(garbled, asked),
        lambda asked: anext(smgs.generate(garbled, asked)),
        lambda asked: smgs.abort(garbled, asked),
    )
    for call in calls:
        with pytest.raises(InvalidApiKey):
            await call(context(**given))
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await call(context(authorization="Bearer right"))


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one \ntwo\n")
    assert read_keys(file) == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="no key"):
        read_keys(file)


def test_keys_come_from_a_file_and_the_environment_but_never_from_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("filed\n")
    settings = load_settings(environment={"DFLASH_API_KEYS": "a, b", "DFLASH_API_KEYS_FILE": str(file)})
    assert keys_of(settings) == ("a", "b", "filed")
    assert settings.has_keys
    assert "'a'" not in repr(settings)
    assert not load_settings(environment={}).has_keys
    with pytest.raises(SettingsError, match="never a flag"):
        load_settings(flags={"api_keys": "a"}, environment={})


async def test_a_watch_of_health_tells_each_change_and_ends_when_the_server_drains() -> None:
    backend, asked = StubBackend(), context()
    health = Health(backend, (), period_s=0.01, watch_s=60.0)
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def read() -> None:
        async for message in streamed(asked, health.watch(HealthCheckRequest())):
            told.put_nowait(message)

    reading = asyncio.create_task(read())
    serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
    for state, status in (("ok", serving), ("loading", not_serving), ("ok", serving)):
        backend.state = {"status": state}
        async with asyncio.timeout(20):
            assert await told.get() == HealthCheckResponse(status=status)
        await asyncio.sleep(0.05)
        assert told.empty()  # what has not changed is not told again
    backend.state = {"status": "draining"}
    async with asyncio.timeout(20):
        await reading
    assert told.get_nowait() == HealthCheckResponse(status=not_serving)
    assert isinstance(told.get_nowait(), ClosingStatus)
    assert told.empty()
    assert asked.code() == StatusCode.UNAVAILABLE
    assert ("error-kind", "unavailable") in asked.trailing_metadata()


def test_generated_code_accepts_runtimes_older_than_ours() -> None:
    """What it refuses is decided by its generator's version, which is at the head of each file."""
    folder = Path(pb.__file__).parent
    stub = (folder / "dflash_pb2_grpc.py").read_text()
    assert "GRPC_GENERATED_VERSION = '1.76.0'" in stub
    assert "# Protobuf Python Version: 6.31.1" in (folder / "dflash_pb2.py").read_text()
    assert tuple(map(int, grpc.__version__.split(".")[:2])) >= (1, 76)


# Answers that go on from elsewhere, for routers that have this server as a lane


def ids_spec(ids: list[int], **fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(model="stub-model", token_ids=pb.TokenIds(ids=ids), **fields)


async def test_an_answer_begun_elsewhere_counts_from_where_its_prompt_ends() -> None:
    backend = StubBackend()
    asked = ids_spec([5, 6, 7, 8], max_tokens=9, continued=3, stopping=pb.Stopping(min_tokens=4))
    async for _ in service(backend).generate(pb.GenerateRequest(spec=asked), context()):
        pass
    generation = backend.last
    assert (generation.prompt_ids, generation.num_continued) == ((5, 6, 7, 8), 3)
    assert (generation.max_tokens, generation.sampling.min_tokens) == (9, 7)  # that of the whole answer
    text = TextStream(tokenizer(), ())
    ticket = Ticket(generation, text, frozenset(), 0.0, Statistics("m", "0"))
    row = ticket.row_request()
    assert (row.tokens, row.prompt_length, row.max_tokens) == ((5, 6, 7, 8), 1, 9)


@pytest.mark.parametrize("asked", [ids_spec([5, 6]), spec()], ids=["token ids", "a text"])
async def test_an_answer_without_a_maximum_may_be_as_long_whatever_its_prompt_is_given_as(
    asked: pb.GenerationSpec,
) -> None:
    backend = StubBackend()
    asked.ClearField("max_tokens")
    async for _ in service(backend).generate(pb.GenerateRequest(spec=asked), context()):
        pass
    room = backend.model_card.max_context - len(backend.last.prompt_ids)
    assert backend.last.max_tokens == min(Limits().default_max_tokens, room)


@pytest.mark.parametrize(
    "asked", [ids_spec([5, 6], continued=2), spec(continued=1)], ids=["nothing but answer", "a text"]
)
async def test_an_answer_goes_on_from_tokens_with_a_prompt_before_them(asked: pb.GenerationSpec) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await anext(service(StubBackend()).generate(pb.GenerateRequest(spec=asked), context()))
    assert caught.value.param == "spec.continued"


async def test_the_prompts_numbers_come_once_and_with_its_tokens() -> None:
    backend = StubBackend()
    asked = ids_spec([5, 6, 7], logprobs=pb.Logprobs(top=2, prompt=True))
    whole = await service(backend).generate_once(pb.GenerateOnceRequest(spec=asked), context())
    assert backend.last.wants_prompt_logprobs
    assert [token.id for token in whole.tokens.prompt] == [6, 7]
    assert [token.logprob for token in whole.tokens.prompt] == [number(i, 2).logprob for i in (6, 7)]
    assert all(len(token.top_logprobs) == 2 for token in whole.tokens.prompt)


async def test_a_conversation_has_no_numbers_of_its_prompt() -> None:
    chat = pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="x")])
    asked = pb.GenerationSpec(model="stub-model", chat=chat, logprobs=pb.Logprobs(prompt=True))
    with pytest.raises(InvalidRequest) as caught:
        await anext(service(StubBackend()).generate(pb.GenerateRequest(spec=asked), context()))
    assert caught.value.param == "spec.logprobs.prompt"


async def test_a_servers_room_is_told_where_it_is_known() -> None:
    backend = StubBackend()
    assert not (await service(backend).get_stats(context())).HasField("room")
    backend.state = {"status": "ok", "room": 0}
    stats = await service(backend).get_stats(context())
    assert (stats.HasField("room"), stats.room) == (True, 0)
