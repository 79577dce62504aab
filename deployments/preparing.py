"""Prepares requests off the event loop: tokenising a book takes seconds."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.generation import Backend, Generation
from deployments.openai.limits import Limits
from deployments.openai.prepare import prepare
from deployments.openai.schema import GenerationRequest

Result = TypeVar("Result")


class Preparer:
    """Turns checked requests into ``Generation``s, in order, and with no short prompt behind a long one."""

    def __init__(self, backend: Backend, limits: Limits):
        self._backend = backend
        self._limits = limits
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise-long")

    async def prepare(self, request: GenerationRequest, num_bytes: int, request_id: str) -> Generation:
        """Fill in and check what needs the model; ``num_bytes`` is the request's size on the wire."""
        return await self.run(num_bytes, prepare, request, self._backend, self._limits, request_id)

    async def run(self, num_bytes: int, work: Callable[..., Result], *arguments: object) -> Result:
        """Do other work that tokenises."""
        tokenising = self._short if num_bytes < self._limits.long_body_bytes else self._long
        return await asyncio.get_running_loop().run_in_executor(tokenising, _done, work, *arguments)


def _done(work: Callable[..., Result], *arguments: object) -> Result:
    try:
        return work(*arguments)
    except StopIteration as error:  # no future takes this one: whoever waits would wait for ever
        raise RuntimeError("StopIteration left the work") from error
