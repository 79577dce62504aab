"""Where gRPC's failures end: whatever a method raises becomes a status. Nothing behind it sets one."""

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from ray.serve.grpc_util import RayServegRPCContext

from deployments.rpc.status import ClosingStatus, set_failure

Answer = TypeVar("Answer")


async def answered(context: RayServegRPCContext, work: Awaitable[Answer]) -> Answer | ClosingStatus:
    """Return what a unary method gives."""
    try:
        return await work
    except Exception as error:
        set_failure(context, error)
        return ClosingStatus()


async def streamed(
    context: RayServegRPCContext, messages: AsyncGenerator[Answer, None]
) -> AsyncGenerator[Answer | ClosingStatus, None]:
    """Yield what a stream gives; a failure is the stream's status, before or after its first message."""
    try:
        async with aclosing(messages):
            async for message in messages:
                yield message
    except Exception as error:
        set_failure(context, error)
        yield ClosingStatus()
