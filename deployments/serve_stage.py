"""Windows on target replicas of this cluster: one streaming call each, mail through an inbox."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.inbox import RemoteInbox
from deployments.lanes import Standing
from deployments.messages import Answer, Closed, Letter, Opening, Refused
from dflash_core.request import WindowId

logger = logging.getLogger("dflash.router")

Answered = TypeVar("Answered")

STATS_TIMEOUT_S = 1.0


class ServeStage:
    """``Stage`` over the target's handle and this replica's inbox."""

    is_anywhere_open = True

    def __init__(self, target: DeploymentHandle):
        self._target = target
        self._inbox = RemoteInbox.start()
        self._inboxes: dict[WindowId, RemoteInbox] = {}
        self._mail: set[asyncio.Task[None]] = set()
        self._lanes: set[str] = set()  # that have been heard of

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        """One streaming call: sticky by itself, and drained by Serve during an upgrade."""
        inbox = self._inbox_of(opening.window_id)
        call = self._target.options(
            method_name="play",
            stream=True,
            session_id=opening.lane or opening.window_id,  # pinning.LaneRouter takes it for a replica's name
            _by_reference=False,
        )
        response = cast(DeploymentResponseGenerator[Answer], call.remote(opening, inbox))
        is_finished = False
        try:
            async for answer in response:
                is_finished = isinstance(answer, Closed | Refused)
                yield answer
        finally:
            if not is_finished:
                response.cancel()

    def send(self, window_id: WindowId, letter: Letter) -> None:
        """Mail to whichever replica plays the window."""
        inbox = self._inbox_of(window_id)
        # A context of its own: Ray cancels whatever a cancelled request has called, and so the letter that
        # takes its row out, or lets the next one in. Letters behind a lost one would wait for ever.
        self._watch(contextvars.Context().run(inbox.put, window_id, letter))

    def forget(self, window_id: WindowId) -> None:
        """End the window's mailbox."""
        inbox = self._inboxes.pop(window_id, None)
        if inbox is not None:
            self._watch(contextvars.Context().run(inbox.close, window_id))

    async def mend(self) -> None:
        """A new inbox, if the one there does not answer."""
        try:
            await asyncio.wait_for(self._inbox.num_boxes(), STATS_TIMEOUT_S)
        except Exception:
            logger.warning("the inbox is lost; starting another")
            self._inbox = RemoteInbox.start()

    async def standings(self, router: str, num_waiting: int) -> list[Standing]:
        """What the targets that Serve sends calls to say of themselves; who is silent is left out."""
        try:
            response = self._target.broadcast("standing", router, num_waiting)
            answers = await response.results_async(timeout_s=STATS_TIMEOUT_S, return_exceptions=True)
            self._lanes = {answer.lane for answer in answers if isinstance(answer, Standing)}
        except TimeoutError:  # of all of them, if of one
            answers = await self._ask_each(router, num_waiting)
        except Exception as error:
            logger.debug("no target answers: %s", error)
            answers = []
        # By name: a call to a lane that is gone is answered by another.
        return list({answer.lane: answer for answer in answers if isinstance(answer, Standing)}.values())

    async def _ask_each(self, router: str, num_waiting: int) -> list[Standing | BaseException]:
        """Each lane that is known by itself: one that is silent keeps nobody else from being heard."""

        async def ask(lane: str) -> Standing:
            call = self._target.options(method_name="standing", session_id=lane)
            async with asyncio.timeout(STATS_TIMEOUT_S):  # not wait_for: it may lose a cancellation
                return await awaited(call.remote(router, num_waiting))

        return await asyncio.gather(*(ask(lane) for lane in self._lanes), return_exceptions=True)

    def _inbox_of(self, window_id: WindowId) -> RemoteInbox:
        return self._inboxes.setdefault(window_id, self._inbox)

    def _watch(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_delivered(work))
        self._mail.add(task)
        task.add_done_callback(self._mail.discard)


async def awaited(response: Awaitable[Answered]) -> Answered:
    """A response of a Serve handle as a coroutine, which a time limit can be set for."""
    return await response


async def _delivered(work: Awaitable[None]) -> None:
    """A lost inbox ends its windows, which is how the desk learns of it; here it is only logged."""
    try:
        await work
    except Exception as error:
        logger.debug("mail was not delivered: %s", error)
