"""Prepares requests off the event loop: tokenising a book takes seconds, compiling a grammar some time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.generation import Backend, Generation
from deployments.openai.limits import Limits
from deployments.openai.prepare import prepare
from deployments.openai.schema import GenerationRequest
from dflash_core.errors import InvalidRequest, QueueFull
from dflash_core.text.grammar import Grammars

Result = TypeVar("Result")

QUEUE_S = 10.0  # that a grammar waits for others to be compiled


class Preparer:
    """Turns checked requests into ``Generation``s, in order, and with no short prompt behind a long one."""

    def __init__(self, backend: Backend, limits: Limits):
        self._backend = backend
        self._limits = limits
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise-long")
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._grammars = Grammars(lambda: backend.tokenizer)

    async def prepare(
        self,
        request: GenerationRequest,
        num_bytes: int,
        request_id: str,
        amend: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> Generation:
        """Fill in and check what needs the model; ``num_bytes`` is the request's size on the wire.

        ``amend`` adds what the request has no field for.
        """
        generation = await self.run(num_bytes, prepare, request, self._backend, self._limits, request_id)
        generation = amend(generation)
        if generation.grammar is not None:
            await self._compile(generation.grammar, generation.grammar_param)
        return generation

    async def run(self, num_bytes: int, work: Callable[..., Result], *arguments: object) -> Result:
        """Do other work that tokenises."""
        tokenising = self._short if num_bytes < self._limits.long_body_bytes else self._long
        return await asyncio.get_running_loop().run_in_executor(tokenising, _done, work, *arguments)

    async def _compile(self, grammar: str, param: str | None) -> None:
        """Raise unless a target could follow the grammar: it compiles it again, from the same text."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_it() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._grammars.matcher(grammar)

        compiled = loop.run_in_executor(self._compiling, compile_it)
        try:
            await asyncio.wait_for(begun.wait(), QUEUE_S)
        except TimeoutError:  # others' grammars are no fault of this one
            compiled.cancel()
            raise QueueFull("Other grammars are being compiled; try again later.", retry_after=5.0) from None
        try:
            await asyncio.wait_for(compiled, self._limits.grammar_timeout_s)
        except InvalidRequest as error:
            raise InvalidRequest(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from None
        except TimeoutError:
            raise InvalidRequest(
                f"Invalid '{param}': it takes longer than {self._limits.grammar_timeout_s:g} seconds to "
                "compile; make it simpler.",
                param=param,
                code="invalid_value",
            ) from None


def _done(work: Callable[..., Result], *arguments: object) -> Result:
    try:
        return work(*arguments)
    except StopIteration as error:  # no future takes this one: whoever waits would wait for ever
        raise RuntimeError("StopIteration left the work") from error
