"""``dflash.v1.DFlashService`` over a ``Backend``. What a method raises is its caller's to tell."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from ray.serve.grpc_util import RayServegRPCContext

from deployments.generation import Backend, Generation
from deployments.remote.route import HEADER, Route, Via, parse_via
from deployments.rpc import facts
from deployments.rpc.answers import Answer
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.entrance import Entrance
from deployments.rpc.requests import continued, in_our_words, parse
from deployments.rpc.spec_fields import require_known
from deployments.rpc.status import metadata_of
from dflash_core.errors import InvalidRequest

Routes = Callable[[Via], tuple[str, Sequence[Route]]]


class DFlashService:
    """The methods of the contract, with this project's names for them."""

    def __init__(self, backend: Backend, entrance: Entrance, routes: Routes = lambda via: ("", ())):
        """``routes`` gives the cluster's id and where rows that have come a certain way may be played."""
        self._backend = backend
        self._entrance = entrance
        self._routes = routes

    async def generate(
        self, request: pb.GenerateRequest, context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Answer as the tokens come."""
        generation = await self._admit(request, context)
        answer = Answer(generation)
        async with aclosing(self._backend.generate(generation)) as events:
            async for event in events:
                yield answer.message(event)

    async def generate_once(
        self, request: pb.GenerateOnceRequest, context: RayServegRPCContext
    ) -> pb.GenerateOnceResponse:
        """Answer in one message: the stream, collected."""
        generation = await self._admit(request, context)
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
        stats = facts.stats(self._backend.model_card, health, snapshots)
        cluster, routes = self._routes(_via(context))
        stats.MergeFrom(facts.routes(cluster, routes))
        return stats

    async def _admit(
        self, message: pb.GenerateRequest | pb.GenerateOnceRequest, context: RayServegRPCContext
    ) -> Generation:
        self._entrance.check(context, message)
        spec, via = message.spec, _via(context)
        if via:
            require_known(spec)
        request = parse(spec)

        def amend(generation: Generation) -> Generation:
            return replace(continued(generation, spec), via=via)

        try:
            return await self._entrance.prepare(request, message.ByteSize(), context, amend)
        except InvalidRequest as error:
            raise in_our_words(error, spec) from None


def _via(context: RayServegRPCContext) -> Via:
    return parse_via(metadata_of(context).get(HEADER))
