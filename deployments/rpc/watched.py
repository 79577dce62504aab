"""gRPC's calls under watch: an account for each, closed with its status however it ends."""

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from deployments.observing.watch import Watch
from deployments.rpc.boundary import answered, streamed
from deployments.rpc.status import ClosingStatus, metadata_of, request_id_of

Answer = TypeVar("Answer")
_CARRIED = ("traceparent", "tracestate")


class Calls:
    """Answers calls, by their full names."""

    def __init__(self, watch: Watch):
        self._watch = watch

    async def answered(
        self, name: str, context: RayServegRPCContext, work: Awaitable[Answer]
    ) -> Answer | ClosingStatus:
        """Return what a unary method gives."""
        account = self._watch.open("RPC", name, request_id_of(context), _carrier(context))
        status = grpc.StatusCode.CANCELLED.name
        try:
            answer = await answered(context, work)
            status = _status(context)
            return answer
        finally:
            self._watch.close(account, status)

    async def streamed(
        self, name: str, context: RayServegRPCContext, messages: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer | ClosingStatus, None]:
        """Yield what a stream gives."""
        account = self._watch.open("RPC", name, request_id_of(context), _carrier(context))
        status = grpc.StatusCode.CANCELLED.name
        try:
            async with aclosing(streamed(context, messages)) as answers:
                async for answer in answers:
                    yield answer
            status = _status(context)
        finally:
            self._watch.close(account, status)


def _status(context: RayServegRPCContext) -> str:
    code = context.code()
    return grpc.StatusCode.OK.name if code is None else code.name


def _carrier(context: RayServegRPCContext) -> dict[str, str]:
    sent = metadata_of(context)
    return {name: sent[name] for name in _CARRIED if isinstance(sent.get(name), str)}
