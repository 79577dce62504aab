"""``dflash.v1.DFlashService`` over a ``Backend``. What a method raises is its caller's to tell."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from ray.serve.grpc_util import RayServegRPCContext

from deployments.generation import Backend, Generation
from deployments.rpc import facts
from deployments.rpc.answers import Answer
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.entrance import Entrance
from deployments.rpc.requests import continued, in_our_words, parse
from dflash_core.errors import InvalidRequest


class DFlashService:
    """The methods of the contract, with this project's names for them."""

    def __init__(self, backend: Backend, entrance: Entrance):
        self._backend = backend
        self._entrance = entrance

    async def generate(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Answer as the tokens come."""
        generation = await self._admit(request.spec, request.ByteSize(), context)
        answer = Answer(generation)
        async with aclosing(self._backend.generate(generation)) as events:
            async for event in events:
                yield answer.message(event)

    async def generate_once(
        self, request: pb.GenerateOnceRequest, context: RayServegRPCContext
    ) -> pb.GenerateOnceResponse:
        """Answer in one message: the stream, collected."""
        generation = await self._admit(request.spec, request.ByteSize(), context)
        answer = Answer(generation)
        async with aclosing(self._backend.generate(generation)) as events:
            async for event in events:
                answer.add(event)
        return answer.whole

    async def list_models(self, context: RayServegRPCContext) -> pb.ListModelsResponse:
        """Tell what is served."""
        self._entrance.check(context)
        return facts.models(self._backend.model_card, self._backend.tokenizer.vocab_size)

    async def get_stats(self, context: RayServegRPCContext) -> pb.GetStatsResponse:
        """Tell how it goes."""
        self._entrance.check(context)
        health, snapshots = await self._backend.health(), await self._backend.snapshot()
        return facts.stats(self._backend.model_card, health, snapshots)

    async def _admit(
        self, spec: pb.GenerationSpec, num_bytes: int, context: RayServegRPCContext
    ) -> Generation:
        self._entrance.check(context, num_bytes)
        request = parse(spec)
        try:
            amend = partial(continued, spec=spec)
            return await self._entrance.prepare(request, num_bytes, context, amend)
        except InvalidRequest as error:
            raise in_our_words(error, spec) from None
