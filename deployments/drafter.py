"""The drafter deployment: contexts by window on the replica's MLX thread, one call per round."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from deployments.engine import Engine
from deployments.exchange.messages import DraftCall, DraftReply, Piece, RowFeatures
from deployments.mlx_thread import MlxThread
from deployments.naming import replica_name
from deployments.observing.lines import write_logs
from deployments.settings import Settings
from dflash_core.request import RowId, WindowId

if TYPE_CHECKING:  # MLX comes after the BLAS
    from deployments.exchange.sessions import Sessions

logger = logging.getLogger("dflash.drafter")


class DrafterReplica:
    """Holds the drafter model. Serve builds one per replica."""

    async def __init__(self, settings: Settings, engine: Engine):
        """Load and warm the drafter on the MLX thread; the replica is ready when this returns.

        Under ``strict`` it loads when the first target calls: one that declines drafts never does.
        """
        write_logs(settings.log_format, settings.log_dir, "drafter")
        self._thread = MlxThread("drafter")
        self._settings, self._engine = settings, engine
        self._loaded: Sessions | None = None
        if not settings.strict:
            await self._thread.run(lambda: self._sessions)
        self._sweeper = asyncio.create_task(self._sweep(settings.session_ttl_s / 4))

    async def draft(self, call: DraftCall) -> DraftReply:
        """One round of one window. Refs are fetched here, straight from the target's object store."""
        fetched = await _fetch(call)
        return await self._thread.run(lambda: self._sessions.draft(fetched))

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        """How much is held of a window's rows; also the target's ping."""
        return await self._thread.run(lambda: self._sessions.lengths(window_id))

    async def close(self, window_id: WindowId) -> None:
        """Forget a window."""
        await self._thread.run(lambda: self._loaded and self._loaded.close(window_id))

    async def stats(self) -> dict[str, Any]:
        """Windows with state here."""
        sessions = await self._thread.run(lambda: self._loaded.num_sessions if self._loaded else 0)
        return {"replica": replica_name(), "sessions": sessions}

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._thread.check()

    def __del__(self) -> None:
        """Serve has drained the replica: end the thread."""
        if hasattr(self, "_sweeper"):
            self._sweeper.cancel()
        if hasattr(self, "_thread"):
            self._thread.stop()

    async def _sweep(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self._thread.run(lambda: self._loaded and self._loaded.sweep())

    @property
    def _sessions(self) -> "Sessions":
        """The loaded drafter; on the MLX thread."""
        if self._loaded is None:
            self._loaded = self._engine.open_drafter(self._settings)
        return self._loaded


async def _fetch(call: DraftCall) -> DraftCall:
    """The same call with arrays in place of refs, each fetched once."""
    pieces = [piece for row in call.features for piece in row.pieces]
    refs = list({piece.data for piece in pieces if isinstance(piece.data, ray.ObjectRef)})
    if not refs:
        return call
    arrays = dict(zip(refs, await asyncio.gather(*refs), strict=True))

    def filled(row: RowFeatures) -> RowFeatures:
        return replace(row, pieces=tuple(replace(p, data=_array(p, arrays)) for p in row.pieces))

    return replace(call, features=tuple(filled(row) for row in call.features))


def _array(piece: Piece, arrays: dict[ray.ObjectRef, np.ndarray]) -> np.ndarray:
    return arrays[piece.data] if isinstance(piece.data, ray.ObjectRef) else piece.data
