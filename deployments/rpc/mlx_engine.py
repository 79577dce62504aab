"""``mlx.grpc.engine.MlxEngine`` over a ``Backend``: the contract by which the smg gateway fronts engines.

Token ids in, token ids out; the gateway does text. A field of its sampling parameters that is not
``optional`` means what it says, 0 too: no top-k, no min-p. Messages come from the extra ``smg``, so this
module is imported only where that is installed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from ray.serve.grpc_util import RayServegRPCContext

from deployments.generation import Backend, Ended, Event, Generation, TextTokens
from deployments.openai.parse import parse_document
from deployments.openai.reader import EventReader
from deployments.openai.schema import CompletionRequest
from deployments.rpc.entrance import Entrance
from deployments.rpc.mlx_messages import common, pb
from deployments.rpc.status import Aborted
from deployments.rpc.tokenizer_files import archive
from dflash_core.checkpoints.fields import Fields
from dflash_core.checkpoints.json_file import read_config
from dflash_core.errors import InvalidRequest

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_OPTIONAL = ("max_tokens", "seed")


class MlxEngine:
    """The methods of the contract."""

    def __init__(self, backend: Backend, entrance: Entrance, find_target: Callable[[], Path]):
        self._backend = backend
        self._entrance = entrance
        self._find_target = find_target
        self._started = time.monotonic()
        self._running: dict[str, asyncio.Event] = {}  # by the gateway's request id; set: abort

    async def generate(self, request: Any, context: RayServegRPCContext) -> AsyncGenerator[Any, None]:
        """Answer by chunks and a closing message, or, unless ``stream`` is set, by the latter alone."""
        self._entrance.check(context, request)  # before a stranger takes or aborts an id
        name = request.request_id
        aborted = self._running[self._free(name)] = asyncio.Event()
        try:
            generation = await self._prepare(request, context)
            async with EventReader(self._backend.generate(generation)) as events:
                answer = _Answer(generation, is_stream=request.stream)
                while (event := await _unless(aborted, events)) is not None:
                    for message in answer.messages(event):
                        yield message
                    if isinstance(event, Ended):
                        return
                raise Aborted("aborted")
        finally:
            del self._running[name]

    async def abort(self, request: Any, context: RayServegRPCContext) -> Any:
        """End the named calls; those that are over, or run on another router, are none of ours."""
        self._entrance.check(context)
        for name in request.request_ids:
            if name in self._running:
                self._running[name].set()
        return pb.AbortResponse()

    async def health_check(self) -> Any:
        """Whether requests are taken. Needs no key."""
        status = str((await self._backend.health()).get("status"))
        return pb.HealthCheckResponse(healthy=status == "ok", message=status)

    async def model_info(self, context: RayServegRPCContext) -> Any:
        """What a gateway must know of the model; its name stands for its path."""
        self._entrance.check(context)
        card, tokenizer = self._backend.model_card, self._backend.tokenizer
        folder = self._find_target()
        config = Fields(read_config(folder), str(folder))
        return pb.GetModelInfoResponse(
            model_path=card.names[0],
            served_model_name=card.names[0],
            is_generation=True,
            max_context_length=card.max_context,
            max_req_input_len=card.max_context - 1,
            vocab_size=tokenizer.vocab_size,
            model_type=config.text("model_type") or "",
            architectures=config.texts("architectures") or (),
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            pad_token_id=_token_id(config, "pad_token_id"),
            bos_token_id=_token_id(config, "bos_token_id"),
        )

    async def server_info(self, context: RayServegRPCContext) -> Any:
        """How busy this router is with calls of this contract, and since when it runs."""
        self._entrance.check(context)
        return pb.GetServerInfoResponse(
            server_type="dflash-serve",
            active_requests=len(self._running),
            uptime_seconds=time.monotonic() - self._started,
        )

    async def tokenizer(self, context: RayServegRPCContext) -> AsyncGenerator[Any, None]:
        """The tokenizer's files as a zip archive in chunks, the last with its digest."""
        self._entrance.check(context)
        packed = await asyncio.to_thread(lambda: archive(self._find_target()))
        for data, sha256 in packed.chunks():
            yield common.GetTokenizerChunk(data=data, sha256=sha256)

    def _free(self, name: str) -> str:
        """An id that is none of the running calls': ``abort`` would end the wrong one."""
        if not name:
            raise InvalidRequest("'request_id' is empty", param="request_id")
        if name in self._running:
            raise InvalidRequest(f"'request_id' is that of a running call: {name!r}", param="request_id")
        return name

    async def _prepare(self, request: Any, context: RayServegRPCContext) -> Generation:
        document = _document(request) | {"model": self._backend.model_card.names[0]}
        parsed = parse_document(document, CompletionRequest)
        return await self._entrance.prepare(parsed, request.ByteSize(), context)


def _token_id(config: Fields, key: str) -> int:
    return config.integer(key, 0, 2**31 - 1) if key in config else 0


def _document(request: Any) -> dict[str, object]:
    """The request as the schema of HTTP's text completions has it."""
    params = request.sampling_params
    if params.HasField("logprobs"):
        raise InvalidRequest(
            "'logprobs' is not supported over this contract; leave it out.",
            param="sampling_params.logprobs",
            code="unsupported_parameter",
        )
    document: dict[str, object] = {
        "prompt": list(request.tokenized.input_ids) if request.HasField("tokenized") else request.text,
        "temperature": params.temperature if params.HasField("temperature") else 1.0,
        "top_p": params.top_p or 1.0,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": list(params.stop_token_ids),
    }
    document |= {name: getattr(params, name) for name in _PENALTIES if getattr(params, name)}
    document |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    if params.logit_bias:
        document["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return document


async def _unless(aborted: asyncio.Event, events: EventReader) -> Event | None:
    """The next event, or None once the call is aborted."""
    reading = asyncio.ensure_future(events.next())
    waiting = asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return None if aborted.is_set() else await reading
    finally:
        reading.cancel()
        waiting.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)


class _Answer:
    """Folds events. A stream's chunks have the new ids, its closing message none."""

    def __init__(self, generation: Generation, *, is_stream: bool):
        self._prompt_tokens = len(generation.prompt_ids)
        self._is_stream = is_stream
        self._ids: list[int] = []

    def messages(self, event: Event) -> list[Any]:
        """What an event gives the gateway, if anything."""
        match event:
            case TextTokens(_, token_ids, usage) if self._is_stream and token_ids:
                chunk = pb.GenerateStreamChunk(
                    token_ids=token_ids,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                )
                return [pb.GenerateResponse(chunk=chunk)]
            case TextTokens(_, token_ids):
                self._ids.extend(token_ids)
                return []
            case Ended():
                return [pb.GenerateResponse(complete=self._complete(event))]
            case _:
                return []

    def _complete(self, ended: Ended) -> Any:
        complete = pb.GenerateComplete(
            output_ids=self._ids,
            finish_reason=ended.finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=ended.usage.completion_tokens,
            cached_tokens=ended.usage.cached_tokens,
        )
        if isinstance(ended.stop_reason, int):
            complete.matched_stop_token_id = ended.stop_reason
        return complete
