"""A client for ``dflash.v1.DFlashService``, sync and async. Needs grpcio and this package's protos, not Ray.

    with Client("127.0.0.1:9000") as client:
        for event in client.generate(ask("demo", "Once upon a time", max_tokens=40)):
            if isinstance(event, Tokens):
                print(event.text, end="")

An address that begins with ``grpcs://`` is called under TLS. Every failure is a ``CallFailed``. Leaving the
loop, or closing the generator, cancels the call. Every call names the application: where Ray Serve has more
than one, its proxy routes by that name, and finds nothing without.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from deployments.rpc.dflash.v1.dflash_pb2 import (
    Conversation,
    Finished,
    GenerateOnceRequest,
    GenerateOnceResponse,
    GenerateRequest,
    GenerateResponse,
    GenerationSpec,
    GetStatsRequest,
    GetStatsResponse,
    ListModelsRequest,
    Message,
    Model,
    Sampling,
    Started,
    Stopping,
    Structure,
    TokenIds,
    Tokens,
)
from deployments.rpc.dflash.v1.dflash_pb2_grpc import DFlashServiceStub

RpcEvent = Started | Tokens | Finished

# gRPC receives 4 MiB by default, which an answer of 250,000 tokens in one message exceeds.
MAX_RECEIVED_BYTES = 64 * 2**20
# By default a channel whose server was away fails all calls for up to two minutes until it tries again.
MAX_BACKOFF_MS = 1000
APPLICATION = "dflash"  # its name in Ray Serve, unless it was deployed under another


class CallFailed(Exception):
    """A call that did not end well.

    ``kind`` is the server's stable word for it, or ``connection`` where no server of ours answered. ``param``
    names the field at fault, ``retry_after`` is in seconds; both may be None.
    """

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Mapping[str, str]):
        self.code = code
        self.details = details
        self.kind = metadata.get("error-kind", _KINDS.get(code, "connection"))
        self.param = metadata.get("error-param")
        seconds = metadata.get("retry-after", "")
        self.retry_after = float(seconds) if seconds.isdecimal() else None
        self.request_id = metadata.get("request_id", "")
        super().__init__(f"{code.name}: {details} ({self.kind})")


# What the client's own library says, without a word from the server.
_KINDS = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "message_too_large",
}


def ask(
    model: str,
    prompt: str | Sequence[int] | Conversation,
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    structure: Structure | None = None,
) -> GenerationSpec:
    """Say what to generate: a text to continue, its token ids, or a conversation (see ``conversation``)."""
    spec = GenerationSpec(
        model=model, max_tokens=max_tokens, sampling=sampling, stopping=stopping, structure=structure
    )
    match prompt:
        case str():
            spec.text = prompt
        case Conversation():
            spec.chat.CopyFrom(prompt)
        case _:
            spec.token_ids.CopyFrom(TokenIds(ids=prompt))
    return spec


def conversation(*turns: tuple[str, str]) -> Conversation:
    """Messages from pairs of role (``system``, ``user``, ``assistant``, ...) and text."""
    messages = [Message(role=f"ROLE_{role.upper()}", content=text) for role, text in turns]
    return Conversation(messages=messages)


class Client:
    """Calls from ordinary code. ``timeout_s`` is the call's deadline, the server's own if None."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca: bytes | None = None,
        application: str | None = APPLICATION,
        max_received_bytes: int = MAX_RECEIVED_BYTES,
    ):
        """``ca``: PEM certificates to trust under TLS; None: those that gRPC ships. Raises ValueError.

        ``application`` is its name in Ray Serve; None: calls name none.
        """
        self._channel = _channel(grpc, address, ca, max_received_bytes)
        self._stub: Any = DFlashServiceStub(self._channel)
        self._metadata = _metadata(application, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._channel.close()

    def generate(
        self, spec: GenerationSpec, *, timeout_s: float | None = None
    ) -> Generator[RpcEvent, None, None]:
        """The answer as its tokens come; raises CallFailed, before or after the first event."""
        with _failures():
            request = GenerateRequest(spec=spec)
            call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
            try:
                for response in call:
                    if (event := _event(response)) is not None:
                        yield event
            finally:
                call.cancel()

    def generate_once(self, spec: GenerationSpec, *, timeout_s: float | None = None) -> GenerateOnceResponse:
        """The whole answer; raises CallFailed."""
        with _failures():
            request = GenerateOnceRequest(spec=spec)
            return self._stub.GenerateOnce(request, timeout=timeout_s, metadata=self._metadata)

    def models(self, *, timeout_s: float | None = None) -> Sequence[Model]:
        """What is served; raises CallFailed."""
        with _failures():
            request = ListModelsRequest()
            return self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata).models

    def stats(self, *, timeout_s: float | None = None) -> GetStatsResponse:
        """How busy the server is and what it has done; raises CallFailed."""
        with _failures():
            return self._stub.GetStats(GetStatsRequest(), timeout=timeout_s, metadata=self._metadata)


class AsyncClient:
    """The same calls on an event loop. Make it where the loop runs."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca: bytes | None = None,
        application: str | None = APPLICATION,
        max_received_bytes: int = MAX_RECEIVED_BYTES,
    ):
        """See ``Client``."""
        self._channel = _channel(grpc.aio, address, ca, max_received_bytes)
        self._stub: Any = DFlashServiceStub(self._channel)
        self._metadata = _metadata(application, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        spec: GenerationSpec,
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncGenerator[RpcEvent, None]:
        """The answer as its tokens come; raises CallFailed, before or after the first event."""
        async with _aio_failures():
            request = GenerateRequest(spec=spec)
            sent = [*self._metadata, *metadata.items()]
            call = self._stub.Generate(request, timeout=timeout_s, metadata=sent)
            try:
                async for response in call:
                    if (event := _event(response)) is not None:
                        yield event
            finally:
                call.cancel()

    async def generate_once(
        self, spec: GenerationSpec, *, timeout_s: float | None = None
    ) -> GenerateOnceResponse:
        """The whole answer; raises CallFailed."""
        async with _aio_failures():
            request = GenerateOnceRequest(spec=spec)
            return await self._stub.GenerateOnce(request, timeout=timeout_s, metadata=self._metadata)

    async def models(self, *, timeout_s: float | None = None) -> Sequence[Model]:
        """What is served; raises CallFailed."""
        async with _aio_failures():
            request = ListModelsRequest()
            response = await self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
            return response.models

    async def is_serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether it takes requests, by ``grpc.health.v1``, which needs no key; raises CallFailed."""
        async with _aio_failures():
            check = self._channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            response = await check(HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata)
            return response.status == HealthCheckResponse.SERVING

    async def stats(
        self, *, timeout_s: float | None = None, metadata: Mapping[str, str] = MappingProxyType({})
    ) -> GetStatsResponse:
        """How busy the server is and what it has done; raises CallFailed."""
        async with _aio_failures():
            sent = [*self._metadata, *metadata.items()]
            return await self._stub.GetStats(GetStatsRequest(), timeout=timeout_s, metadata=sent)


def _event(response: GenerateResponse) -> RpcEvent | None:
    match response.WhichOneof("event"):
        case "started":
            return response.started
        case "tokens":
            return response.tokens
        case "finished":
            return response.finished
        case _:  # of a server that knows more kinds
            return None


def _channel(kind: Any, address: str, ca: bytes | None, max_received_bytes: int) -> Any:
    """A channel of ``grpc`` or ``grpc.aio``, under TLS if the address says so."""
    options = [
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
    ]
    if address.startswith("grpcs://"):
        credentials = grpc.ssl_channel_credentials(root_certificates=ca)
        return kind.secure_channel(address.removeprefix("grpcs://"), credentials, options)
    if ca is not None:
        raise ValueError(f"certificates are given, but {address} is not called under TLS: say grpcs://")
    return kind.insecure_channel(address.removeprefix("grpc://"), options)


def _metadata(application: str | None, api_key: str | None) -> list[tuple[str, str]]:
    metadata = [] if application is None else [("application", application)]
    return metadata if api_key is None else [*metadata, ("authorization", f"Bearer {api_key}")]


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _failed(error) from None


@asynccontextmanager
async def _aio_failures() -> AsyncIterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _failed(error) from None


def _failed(error: Any) -> CallFailed:
    """Both libraries' errors have the same three questions to ask."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    return CallFailed(error.code(), error.details() or "", trailing)
