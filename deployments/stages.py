"""All stages of a router as one: targets of its own cluster, and lanes elsewhere. Each window is on one."""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.burst import Stage
from deployments.desk import Desk
from deployments.lanes import LOCAL
from deployments.messages import Answer, Letter, Opening
from deployments.remote.lane import RemoteLane
from deployments.remote.route import Circular, Route, Via, best, is_closed
from deployments.serve_stage import ServeStage
from dflash_core.request import WindowId

logger = logging.getLogger("dflash.remote")

PERIOD_S = 1.0
RECENT_S = 10.0  # how long a caller counts as one after it asked


class Stages:
    """Passes each window on to whoever plays it, and tells the desk how all lanes stand."""

    def __init__(self, router: str, target: DeploymentHandle | None, remote: Sequence[RemoteLane]):
        self._router = router
        self._local = ServeStage(target) if target is not None else None
        self._remote = {lane.name: lane for lane in remote}
        self._callers: dict[str, float] = {}  # clusters that have us as a lane, and when they asked
        self._circles: Mapping[str, str] = {}
        self._homes: dict[WindowId, Stage] = {}
        self._watches: list[asyncio.Task[None]] = []

    @property
    def is_anywhere_open(self) -> bool:
        """Serve finds a target of this cluster, if there are any."""
        return self._local is not None

    @property
    def has_remote(self) -> bool:
        """Whether a remote lane takes rows now."""
        return any(lane.state == "ok" for lane in self._remote.values())

    @property
    def remote_states(self) -> Mapping[str, str]:
        """What is known of each remote lane, by its address."""
        return {name: lane.state for name, lane in self._remote.items()}

    @property
    def circles(self) -> Mapping[str, str]:
        """Remote lanes by which a cluster is reached that has this one as a lane too, and its id.

        Harmless: no row passes a cluster twice.
        """
        since = time.monotonic() - RECENT_S
        callers = {cluster for cluster, asked_at in self._callers.items() if asked_at > since}
        behind = {name: lane.clusters & callers for name, lane in self._remote.items()}
        return {name: min(clusters) for name, clusters in behind.items() if clusters}

    def require_way(self, via: Via, own: str) -> None:
        """Raise Circular for a row that only targets of this cluster may play, where there are none."""
        if self._local is None and via and is_closed(via, own):
            raise Circular(
                f"the row has passed {len(via)} clusters, this one among them or too many, "
                "and there are no targets here"
            )

    def routes(self, own: Route | None, cluster: str, via: Via) -> Sequence[Route]:
        """Where rows that came this way may be played: here, by ``own``, and behind the lanes."""
        self._note_caller(via)
        passed = (*via, cluster)
        found = [own] if own is not None else []
        for lane in self._remote.values():
            found += [Route((cluster, *r.clusters), r.room) for r in lane.routes if r.is_open(passed)]
        return best(found)

    def watch(self, desk: Desk) -> None:
        """Keep the desk informed from now on; called on the event loop, and once is enough."""
        if self._watches:
            return
        if self._local is not None:
            self._start(self._watch_targets(desk, self._local))
        for lane in self._remote.values():
            self._start(lane.watch(desk.hear, PERIOD_S))

    def close(self) -> None:
        """End the watches."""
        for task in self._watches:
            task.cancel()

    def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        """Open a window where it is meant for."""
        stage = self._remote.get(opening.lane) or self._local
        if stage is None:
            raise LookupError(f"there is no lane {opening.lane}")
        self._homes[opening.window_id] = stage
        return stage.play(opening)

    def send(self, window_id: WindowId, letter: Letter) -> None:
        """Mail to the replica that plays it."""
        stage = self._homes.get(window_id) or self._local
        if stage is not None:
            stage.send(window_id, letter)

    def forget(self, window_id: WindowId) -> None:
        """The window is over."""
        stage = self._homes.pop(window_id, None)
        if stage is not None:
            stage.forget(window_id)

    async def mend(self) -> None:
        """Only mail within the cluster can be lost apart from its window."""
        if self._local is not None:
            await self._local.mend()

    def _note_caller(self, via: Via) -> None:
        if not self._remote or not via:
            return
        now = time.monotonic()
        self._callers = {caller: at for caller, at in self._callers.items() if at > now - RECENT_S}
        self._callers[via[-1]] = now
        known, self._circles = self._circles, self.circles
        for name in self._circles.keys() - known.keys():
            told = f"cluster {self._circles[name]}, which has this one as a lane too"
            logger.warning("remote lane %s leads to %s: rows go either way, and none goes back", name, told)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # A context of its own: Serve would cancel what it calls with the request in which it began.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._watches.append(task)

    async def _watch_targets(self, desk: Desk, local: ServeStage) -> None:
        while True:
            desk.hear(LOCAL, await local.standings(self._router, desk.num_waiting))
            await asyncio.sleep(PERIOD_S)
