"""The engine's ``Drafter`` over a Serve handle. A drafter that is dead, slow or strange costs nothing but
its drafts: the round is classic, the features wait in the ledger, and once a ping is answered the drafter
gets what it lacks and speculation goes on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from deployments.exchange.ledger import Ledger
from deployments.exchange.messages import DraftCall, DraftReply
from deployments.exchange.patience import Patience
from deployments.exchange.retention import Retention
from deployments.exchange.transport import Transport, dtype_name, to_wire
from dflash_core.prefixes import SavedContext
from dflash_core.protocols import Drafts, FeatureBlock, PendingDrafts, Ready
from dflash_core.request import RowId, WindowId

logger = logging.getLogger("dflash.exchange")

PING_PAUSE_S = 0.05  # after one that failed; a round or two, since drafts are back with the answer
PING_TIMEOUT_S = 2.0
MISMATCH_PAUSE_S = 10.0  # before a drafter of another checkpoint is asked again

T = TypeVar("T")


class DrafterLink(Protocol):
    """Calls to the drafter replica that holds a window. Coroutines run on the replica's event loop."""

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        """One round."""
        ...

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        """A ping that also tells what is held of a window's rows."""
        ...

    async def close(self, window_id: WindowId) -> None:
        """Forget a window."""
        ...


@dataclass
class _Window:
    ledger: Ledger
    number: int = 0
    ping: "Future[dict[RowId, int]] | None" = None  # set while the drafter is away
    late: "Future[DraftReply] | None" = None  # an answer that nobody waits for any more


class RemoteDrafter:
    """Implements ``dflash_core.protocols.Drafter``; called on the MLX thread alone."""

    def __init__(
        self,
        link: DrafterLink,
        loop: asyncio.AbstractEventLoop,
        transport: Transport,
        fingerprint: str,
        block_size: int,
        patience: Patience,
        feature_bytes: int | None = None,
    ):
        self.fingerprint = fingerprint  # of the drafter whose features we make
        self.transport = transport
        self.retention = Retention(feature_bytes, transport.count_lost_context)
        self.patience = patience
        self._link = link
        self._loop = loop
        self._block_size = block_size
        self._windows: dict[WindowId, _Window] = {}
        self._stranger = ""  # fingerprint of a drafter whose features we do not make

    @property
    def state(self) -> str:
        """``ok``, ``away`` (dead, slow or not there yet) or ``drafter mismatch``."""
        if self._stranger:
            return "drafter mismatch"
        pings = [window.ping for window in self._windows.values() if window.ping is not None]
        return "ok" if all(ping.done() for ping in pings) else "away"

    @property
    def block_size(self) -> int:
        """Widest block, the anchor included."""
        return self._block_size

    @property
    def num_refs(self) -> int:
        """Objects kept in the object store for live rows."""
        return sum(window.ledger.num_refs for window in self._windows.values())

    def wait_for_drafter(self, timeout_s: float) -> bool:
        """Whether a drafter answers within this time; blocks the MLX thread, so for start-up alone."""
        try:
            self._start(self._link.lengths(WindowId("hello"))).result(timeout_s)
        except Exception as error:
            logger.warning("no drafter has answered yet: %s", type(error).__name__)
            return False
        return True

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        """Keep features of joining rows; they travel with the next draft."""
        self._keep(self._window(window_id), block)

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> PendingDrafts:
        """Send what the drafter lacks and ask for drafts; does not block."""
        window = self._window(window_id)
        self._keep(window, block)
        if width == 1 or not self._is_back(window):  # a classic round needs no call; features wait here
            return Ready(_none(len(block.row_ids)))
        # A row without a context is an idle slot to the drafter.
        row_ids = tuple(r if r is not None and window.ledger.can_draft(r) else None for r in block.row_ids)
        rows = [row_id for row_id in row_ids if row_id is not None]
        if not rows:
            return Ready(_none(len(block.row_ids)))
        window.number += 1
        call = DraftCall(
            window_id,
            window.number,
            self.fingerprint,
            dtype_name(block.x.dtype),
            block.x.shape[-1] * block.x.itemsize,
            row_ids,
            self.transport.pack(tuple(window.ledger.missing(row_id) for row_id in rows)),
            np.array(anchors, dtype=np.int32),
            width,
        )
        asked = _Asked(self, window, call, self.patience.limit_s(_shape(call), _news(call)))
        asked.send(self._start(self._link.draft(call, self.transport.is_by_reference(call))))
        return asked

    def save(self, window_id: WindowId, row_id: RowId, length: int) -> SavedContext | None:
        """The row's features, from which a drafter makes its context; None if some were let go."""
        return self._window(window_id).ledger.save(row_id, length)

    def restore(self, window_id: WindowId, row_id: RowId, saved: SavedContext) -> None:
        """Keep a row's saved features; they travel with its first draft."""
        self._window(window_id).ledger.restore(row_id, saved)

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        """Let go of rows; the next draft does not name them, so the drafter lets go as well."""
        window = self._window(window_id)
        for row_id in row_ids:
            window.ledger.drop(row_id)

    def close(self, window_id: WindowId) -> None:
        """Let go of a window here and, if it can be reached, there."""
        window = self._windows.pop(window_id, None)
        if window is None:
            return
        window.ledger.close()
        for waiting in (window.ping, window.late):
            if waiting is not None:
                waiting.cancel()
        self._start(_quietly(self._link.close(window_id)))

    def receive(
        self, window: _Window, call: DraftCall, answer: "Future[DraftReply]", timeout_s: float
    ) -> Drafts:
        """Wait for an answer; whatever goes wrong makes the round classic.

        A late answer is not cancelled: it is dropped, but what it took is still to be learnt.
        """
        try:
            reply = answer.result(timeout_s)
        except Exception as error:  # dead actor, Serve's own errors, time-out: all are "no drafts now"
            window.late = None if answer.done() else answer
            error.__traceback__ = None  # the answer holds the error, whose trace would hold answer and call
            self._lose(call.window_id, window, error)
            return _none(len(call.row_ids))
        if reply.fingerprint != self.fingerprint:
            self._refuse(call.window_id, window, reply.fingerprint)
            return _none(len(call.row_ids))
        self._stranger = ""
        if reply.number != call.number:
            self._lose(call.window_id, window, RuntimeError(f"answer to call {reply.number}"))
            return _none(len(call.row_ids))
        for row_id, length in reply.lengths.items():
            window.ledger.confirm(row_id, length)
        if reply.lost:
            self.transport.count_failure()
        return Drafts(ids=mx.array(reply.ids), has_taken=True)

    def _keep(self, window: _Window, block: FeatureBlock) -> None:
        if not block.counts.any():
            return
        x = to_wire(block.x)
        for slot, row_id in enumerate(block.row_ids):
            count = int(block.counts[slot])
            if row_id is not None and count:
                window.ledger.append(row_id, int(block.starts[slot]), x[slot, :count].copy())

    def _is_back(self, window: _Window) -> bool:
        """Whether the drafter can be asked; after an absence, once a ping has told what it still holds."""
        if window.ping is None:
            return True
        if not window.ping.done():
            return False
        window.ledger.confirm_all(window.ping.result())
        window.ping = None
        return True

    def _lose(self, window_id: WindowId, window: _Window, error: Exception) -> None:
        told = {"window": window_id}
        logger.warning(
            "window %s plays without drafts until its drafter answers again: %s",
            window_id,
            f"{type(error).__name__}: {error}" if str(error) else "they did not come in time",
            extra=told,
        )
        self.transport.count_failure()
        window.ping = self._start(self._ping(window_id))

    def _refuse(self, window_id: WindowId, window: _Window, fingerprint: str) -> None:
        """A drafter of another checkpoint: our features mean nothing to it. Ask again, but not often."""
        if self._stranger != fingerprint:
            self._stranger = fingerprint
            logger.error(
                "drafter mismatch: this target makes features for drafter %s and was answered by %s; rounds "
                "are classic until both are loaded from one checkpoint (deploy the application again)",
                self.fingerprint,
                fingerprint,
            )
        self.transport.count_mismatch()
        window.ping = self._start(self._ping(window_id, MISMATCH_PAUSE_S))

    async def _ping(self, window_id: WindowId, pause_s: float = 0.0) -> dict[RowId, int]:
        """Ask until somebody answers; ends with the window at the latest."""
        await asyncio.sleep(pause_s)
        while True:
            try:
                return await asyncio.wait_for(self._link.lengths(window_id), PING_TIMEOUT_S)
            except Exception as error:
                logger.debug("drafter of window %s does not answer: %s", window_id, error)
            await asyncio.sleep(PING_PAUSE_S)

    def _window(self, window_id: WindowId) -> _Window:
        if window_id not in self._windows:
            self._windows[window_id] = _Window(Ledger(self.transport, self.retention))
        return self._windows[window_id]

    def _start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _Asked:
    """A call under way, and until when its answer is of use."""

    def __init__(self, drafter: RemoteDrafter, window: _Window, call: DraftCall, limit_s: float):
        self._drafter, self._window, self._call = drafter, window, call
        self._until = time.monotonic() + limit_s
        self._answer: Future[DraftReply] = Future()

    def send(self, answer: "Future[DraftReply]") -> None:
        """The call is on its way."""
        self._answer = answer
        answer.add_done_callback(_learner(self._drafter.patience, self._call))

    def wait(self) -> Drafts:
        left = max(0.0, self._until - time.monotonic())
        return self._drafter.receive(self._window, self._call, self._answer, left)


def _learner(patience: Patience, call: DraftCall) -> Callable[["Future[DraftReply]"], None]:
    """Note how long an answer took, late or not; called on the event loop's thread.

    A future keeps its callbacks, so this one must not know the call: the call would then keep itself, and
    its features in the object store, until Python's cycle collector comes by.
    """
    shape, news, asked_at = _shape(call), _news(call), time.monotonic()

    def learn(answer: "Future[DraftReply]") -> None:
        if not answer.cancelled() and answer.exception() is None:
            patience.observe(shape, news, time.monotonic() - asked_at)

    return learn


def _shape(call: DraftCall) -> tuple[int, int]:
    return len(call.row_ids), call.width


def _news(call: DraftCall) -> int:
    """Tokens whose features the call brings."""
    return sum(row.count for row in call.features)


def _none(num_rows: int) -> Drafts:
    """No drafts; the features are safe in the ledger, so the engine need not keep them."""
    return Drafts(ids=mx.zeros((num_rows, 0), dtype=mx.int32), has_taken=True)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """A courtesy call: the drafter forgets by itself after a while."""
    try:
        await asyncio.wait_for(work, PING_TIMEOUT_S)
    except Exception as error:
        logger.debug("courtesy call failed: %s", error)
