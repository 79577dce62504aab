"""The rows that a router has on a remote lane, each a call; together they look like any window."""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from deployments.client import CallFailed, RpcEvent
from deployments.messages import Admit, Answer, Closed, LastCall, Letter, Played, Retire, Returned
from deployments.remote.route import Circular, Via
from deployments.remote.row import RemoteRow
from deployments.rpc.spec_fields import UnknownField
from dflash_core.errors import ContextLengthExceeded, InvalidRequest, QueueFull, RowFailed
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, RowRequest, WindowId

logger = logging.getLogger("dflash.remote")

Call = Callable[[RowRequest, Via], AsyncGenerator[RpcEvent, None]]

AGAIN_S = 0.5  # after a lost call; by then the lane's health may be known
MISFIT_S = 10.0  # after an answer that asking again will not change: a wrong key, another model
ROWS_OWN = (InvalidRequest.kind, ContextLengthExceeded.kind, RowFailed.kind)  # failures that go with the row
NOT_THESE = (Circular.kind, UnknownField.kind)  # rows like this one; others may go there
MISFITS = ("invalid_api_key", "model_not_found", "payload_too_large", "message_too_large")


@dataclass
class _Batch:
    """What came together: at most once of each row, so that nobody's tokens change places."""

    rounds: list[RowProgress] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each round, since the row's last tokens
    others: list[RowProgress] = field(default_factory=list)
    row_ids: set[RowId] = field(default_factory=set)


class RemoteWindow:
    """Calls by row. Everything happens on the event loop."""

    def __init__(self, window_id: WindowId, call: Call, letters: Iterable[Letter]):
        self._id = window_id
        self._call = call
        self._letters = list(letters)  # until the window is played
        self._is_playing = False
        self._is_last_call = False
        self._rows: dict[RowId, tuple[RemoteRow, asyncio.Task[None]]] = {}
        self._batches: list[_Batch] = []
        self._returned: list[Returned] = []
        self._num_rounds = 0
        self._news = asyncio.Event()

    @property
    def num_rows(self) -> int:
        """Calls that are not over."""
        return len(self._rows)

    def send(self, letter: Letter) -> None:
        """Carry out a letter, or keep it until the window is played."""
        if not self._is_playing:
            self._letters.append(letter)
            return
        match letter.command:
            case Admit(request, via):
                row = RemoteRow(request)
                # A context of its own: the call is not its client's to cancel, but the row's.
                loop, empty = asyncio.get_running_loop(), contextvars.Context()
                self._rows[request.row_id] = (row, loop.create_task(self._play(row, via), context=empty))
            case Retire(row_id):
                if row_id in self._rows:
                    self._rows.pop(row_id)[1].cancel()
            case LastCall():
                self._is_last_call = True
        self._news.set()

    async def play(self) -> AsyncGenerator[Answer, None]:
        """What comes of the rows; rows whose messages come together are told as one round."""
        self._is_playing = True
        for letter in self._letters:
            self.send(letter)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await asyncio.sleep(0)  # let the other messages that are here be read
                while self._batches:
                    yield Played(self._report(self._batches.pop(0)), 0)
                while self._returned:  # after what these rows still got
                    yield self._returned.pop(0)
                if self._is_last_call and not self._rows:
                    yield Closed()
                    return
        finally:
            for _, task in self._rows.values():
                task.cancel()
            self._rows.clear()

    def lose(self) -> None:
        """The lane does not answer any more: all rows go elsewhere."""
        for row, task in list(self._rows.values()):
            task.cancel()
            self._give_back(row, Returned(row.request.row_id, row.has_started, AGAIN_S))

    async def _play(self, row: RemoteRow, via: Via) -> None:
        try:
            async with aclosing(self._call(row.request, via)) as events:
                async for event in events:
                    progress = row.take(event)
                    if progress is not None:
                        self._add(row, progress)
            # Unless it has ended: a newer server may close an answer by an event that the client passes over.
            self._give_back(row, Returned(row.request.row_id, row.has_started, AGAIN_S))
        except CallFailed as error:
            self._fail(row, error)
        except Exception:
            logger.exception("a call to a remote lane failed", extra={"window": self._id})
            self._give_back(row, Returned(row.request.row_id, row.has_started, AGAIN_S))

    def _add(self, row: RemoteRow, progress: RowProgress) -> None:
        now = time.monotonic()
        if not self._batches or progress.row_id in self._batches[-1].row_ids:
            self._batches.append(_Batch())
        self._batches[-1].row_ids.add(progress.row_id)
        if row.is_round(progress):
            self._batches[-1].rounds.append(progress)
            self._batches[-1].seconds.append(now - row.last_at if row.last_at is not None else 0.0)
        else:
            self._batches[-1].others.append(progress)
        if progress.tokens:
            row.last_at = now
        if progress.finish is not None:
            self._rows.pop(row.request.row_id, None)
        self._news.set()

    def _fail(self, row: RemoteRow, error: CallFailed) -> None:
        row_id = row.request.row_id
        if error.kind in ROWS_OWN:
            self._add(row, row.fail(error.details, error.kind))
        elif error.kind == QueueFull.kind:
            self._give_back(row, Returned(row_id, False, error.retry_after or 1.0))
        elif error.kind in NOT_THESE:
            logger.warning("row %s may not go there: %s", row_id, error, extra={"window": self._id})
            # As a lost place: should the lane go on telling otherwise, the row is over after some.
            self._give_back(row, Returned(row_id, True, AGAIN_S))
        elif error.kind in MISFITS:
            logger.error("a remote lane refuses our rows: %s", error, extra={"window": self._id})
            self._give_back(row, Returned(row_id, False, MISFIT_S))
        else:
            logger.warning("row %s goes on elsewhere: %s", row_id, error, extra={"window": self._id})
            self._give_back(row, Returned(row_id, row.has_started, error.retry_after or AGAIN_S))

    def _give_back(self, row: RemoteRow, returned: Returned) -> None:
        playing = self._rows.get(row.request.row_id)
        if playing is not None and playing[0] is row:  # a row that has ended may have a namesake by now
            del self._rows[row.request.row_id]
            self._returned.append(returned)
            self._news.set()

    def _report(self, batch: _Batch) -> RoundReport:
        num_rows = len(batch.rounds)
        self._num_rounds += bool(num_rows)
        width = max((len(progress.tokens) for progress in batch.rounds), default=0)
        seconds = {"remote": sum(batch.seconds) / num_rows} if num_rows else {}
        rows = (*batch.rounds, *batch.others)
        return RoundReport(
            self._id, self._num_rounds, width, rows, num_rows, prefilling_rows=0, seconds=seconds
        )
