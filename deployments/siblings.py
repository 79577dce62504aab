"""What all routers of the application show, collected by whichever of them is asked.

Each router counts for itself and a scrape meets one of them, so that one asks the others. Answers are kept
for a moment, and all who ask meanwhile share them: however many viewers and scrapers there are, they cost one
call per router and moment.
"""

import asyncio
import contextvars
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.view import Overview, RouterView

logger = logging.getLogger("dflash.router")

FRESH_S = 0.4  # less than the half second between two looks of a viewer
TIMEOUT_S = 2.0  # more than a router takes to find its target silent

Answers = Sequence[RouterView | BaseException]
Ask = Callable[[], Awaitable[Answers]]


class Siblings:
    """The routers' views. ``own`` gives this router's, told how many others are silent."""

    def __init__(self, own: Callable[[int], Awaitable[RouterView]], ask: Ask):
        self._own = own
        self._ask = ask
        self._asking: asyncio.Task[Overview] | None = None
        self._fresh_until = 0.0

    async def overview(self) -> Overview:
        """Every router that answers, this one first, and how many do not."""
        loop, task = asyncio.get_running_loop(), self._asking
        if task is None or (task.done() and loop.time() >= self._fresh_until):
            # A context of its own: Ray cancels what a cancelled request has called, and others wait for this.
            task = self._asking = loop.create_task(self._collect(), context=contextvars.Context())
        return await asyncio.shield(task)

    async def _collect(self) -> Overview:
        try:
            answers = await self._ask()
        except Exception as error:
            logger.debug("no sibling answers: %s", error)
            answers = ()
        num_missing = sum(not isinstance(answer, RouterView) for answer in answers)
        own = await self._own(num_missing)
        others = {view.engine: view for view in answers if isinstance(view, RouterView)}
        others.pop(own.engine, None)
        self._fresh_until = asyncio.get_running_loop().time() + FRESH_S
        return Overview(
            own.engine, (own, *sorted(others.values(), key=lambda view: view.engine)), num_missing
        )


class Replicas:
    """Every replica of this deployment. Outside Serve there is one router, and nobody to ask."""

    def __init__(self, method: str):
        self._method = method
        self._handle: DeploymentHandle | None = None
        try:
            self._context = serve.get_replica_context()
        except RayServeException:
            self._context = None

    async def ask(self) -> Answers:
        """Call the method on each; who fails to answer in time gives an exception."""
        if self._context is None:
            return ()
        if self._handle is None:
            handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
            self._handle = handle.options(_by_reference=True)
        response = self._handle.broadcast(self._method)
        # Of the two ways to wait, the one for threads takes each answer by itself: a replica that hangs does
        # not take the others' answers with it.
        results = functools.partial(response.results, timeout_s=TIMEOUT_S, return_exceptions=True)
        return cast(Answers, await asyncio.to_thread(results))
