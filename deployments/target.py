"""The target deployment: a streaming call per burst window, played on the replica's MLX thread."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from deployments.engine import Engine, TargetParts
from deployments.exchange.handle import HandleLink
from deployments.inbox import Mailbox
from deployments.lane import Lane
from deployments.lanes import Standing
from deployments.messages import Answer, Closed, Opened, Opening, Refused
from deployments.mlx_thread import MlxThread
from deployments.naming import replica_name
from deployments.observing.lines import write_logs
from deployments.scaling import Demand
from deployments.settings import Settings

logger = logging.getLogger("dflash.target")


class TargetReplica:
    """Holds the target model. Serve builds one per replica."""

    async def __init__(self, settings: Settings, engine: Engine, drafter: DeploymentHandle | None = None):
        """Load and warm the model on the MLX thread; the replica is ready when this returns."""
        self._name = replica_name()
        write_logs(settings.log_format, settings.log_dir, "target")
        self._parts: TargetParts | None = None
        self._demand = Demand()
        self._thread = MlxThread("target", work=self._step)
        link = HandleLink(drafter) if drafter is not None else None
        loop = asyncio.get_running_loop()
        self._parts = await self._thread.run(lambda: engine.open_target(settings, link, loop))

    async def play(self, opening: Opening, inbox: Mailbox) -> AsyncGenerator[Answer, None]:
        """Play a window to its end; closing this generator frees the window at once."""
        window_id = opening.window_id
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Answer] = asyncio.Queue()

        def post(answer: Answer) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        mail: asyncio.Task[None] | None = None
        try:
            if not await self._thread.run(lambda: self._playing.open(window_id, opening.letters, post)):
                yield Refused("lane_full", self._name)
                return
            self._thread.wake()
            mail = asyncio.create_task(self._read_mail(opening, inbox))
            yield Opened(self._name, self._playing.max_rows)
            while True:
                answer = await answers.get()
                yield answer
                if isinstance(answer, Closed):
                    return
        finally:
            if mail is not None:
                mail.cancel()
            self._thread.submit(lambda: self._playing.close(window_id))

    async def standing(self, router: str, num_waiting: int) -> Standing:
        """What routers read about once a second, at once: not even a round is waited for.

        Each tells how many requests it has no place for, which is what Serve scales by.
        """
        self._demand.hear(router, num_waiting)
        return replace(self._playing.standing, lane=self._name)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what ``scaling.by_rows`` decides by."""
        return self._demand.figures(self._playing.standing.num_rows)

    async def stats(self) -> dict[str, Any]:
        """What this replica plays now."""
        return await self._thread.run(self._count)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._thread.check()

    def __del__(self) -> None:
        """Serve has drained the replica: end the thread."""
        if hasattr(self, "_thread"):
            self._thread.stop()

    @property
    def _playing(self) -> Lane:
        if self._parts is None:
            raise RuntimeError("the model is not loaded yet")
        return self._parts.lane

    def _step(self) -> bool:
        return self._parts is not None and self._parts.lane.step()

    def _count(self) -> dict[str, Any]:
        playing, parts = self._playing, self._parts
        exchange = parts.exchange if parts is not None else None
        return {
            "lane": self._name,
            "windows": playing.num_windows,
            "rows": playing.num_rows,
            "drafter": exchange.state if exchange is not None else "none",
            "exchange_refs": exchange.num_refs if exchange is not None else 0,
            "feature_bytes": exchange.retention.num_bytes if exchange is not None else 0,
            "facts": dict(parts.facts) if parts is not None else {},
        }

    async def _read_mail(self, opening: Opening, inbox: Mailbox) -> None:
        """Hand joins and leaves to the MLX thread; a lost inbox ends the window."""
        window_id = opening.window_id
        try:
            async for letters in inbox.take(window_id, len(opening.letters)):
                self._thread.submit(lambda batch=letters: self._playing.apply(window_id, batch))
                self._thread.wake()
        except RayError as error:
            told = {"window": window_id}
            logger.warning("window %s lost its inbox: %s", window_id, type(error).__name__, extra=told)
            self._thread.submit(lambda: self._playing.end(window_id, Closed("inbox_lost")))
