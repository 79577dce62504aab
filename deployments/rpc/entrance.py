"""The way in, for both contracts: who may call, how large a request may be, and what it becomes."""

from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deployments.generation import Backend, Generation
from deployments.openai.errors import PayloadTooLarge
from deployments.openai.limits import Limits
from deployments.openai.schema import GenerationRequest
from deployments.preparing import Preparer
from deployments.rpc.access import Access
from deployments.rpc.status import request_id_of


class Entrance:
    """Checks callers and prepares requests; one for a replica."""

    def __init__(self, backend: Backend, limits: Limits, access: Access):
        self._access = access
        self._max_bytes = limits.max_body_bytes
        # One default for text, messages and token ids: here they are forms of one prompt.
        one = replace(limits, default_completion_tokens=limits.default_max_tokens)
        self._preparer = Preparer(backend, one)

    def check(self, context: RayServegRPCContext, message: Message | None = None) -> None:
        """Raise unless the caller may come in, with this message; a stranger hears nothing of what it is."""
        self._access.check(context)
        if message is not None and (num_bytes := message.ByteSize()) > self._max_bytes:
            raise PayloadTooLarge(f"The request has {num_bytes} bytes; the limit is {self._max_bytes}.")

    async def prepare(
        self,
        request: GenerationRequest,
        num_bytes: int,
        context: RayServegRPCContext,
        amend: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> Generation:
        """Fill in and check what needs the model; ``amend`` adds what the request has no field for."""
        generation = await self._preparer.prepare(request, num_bytes, request_id_of(context), amend)
        return replace(generation, client=self._access.check(context))
