"""One remote lane: the stage over an address, whether it is well, and how many rows it has room for."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import grpc

from deployments.client import AsyncClient, CallFailed, RpcEvent
from deployments.lanes import Standing
from deployments.messages import Answer, Letter, Opened, Opening
from deployments.remote.spec import spec_of
from deployments.remote.window import RemoteWindow
from dflash_core.request import RowRequest, WindowId

logger = logging.getLogger("dflash.remote")

TIMEOUT_S = 2.0  # of one question; across a slow link an answer may take most of a second
PATIENCE = 2  # questions without an answer, one after another, after which its rows go elsewhere

State = Literal["unknown", "ok", "not serving", "away", "refuses our key", "another model"]
Hear = Callable[[str, Iterable[Standing]], None]


@dataclass(frozen=True, slots=True)
class Model:
    """What a lane must serve."""

    names: tuple[str, ...]
    vocab_size: int
    max_context: int  # at least: what fits here is to fit there


class RemoteLane:
    """Implements ``burst.Stage``; its windows are made of calls."""

    is_anywhere_open = False

    def __init__(
        self,
        address: str,
        key: str | None,
        model: Model,
        max_rows: int,
        new_client: Callable[..., AsyncClient] = AsyncClient,
    ):
        """``max_rows`` is what an older server gets that does not tell of its room."""
        self.name = address
        self.state: State = "unknown"
        self._key = key
        self._model = model
        self._max_rows = max_rows
        self._new_client = new_client
        self._client: AsyncClient | None = None  # it belongs to the event loop that made it
        self._served_name: str | None = None
        self._num_silences = 0
        self._windows: dict[WindowId, RemoteWindow] = {}

    async def watch(self, hear: Hear, period_s: float) -> None:
        """Ask again and again how it stands, and tell; ends when cancelled."""
        try:
            while True:
                standing = await self._ask()
                hear(self.name, () if standing is None else (standing,))
                await asyncio.sleep(period_s)
        finally:
            if self._client is not None:
                await self._client.close()

    def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        """A window; its rows are called as they come."""
        window = RemoteWindow(opening.window_id, self._call, opening.letters)
        self._windows[opening.window_id] = window
        return self._play(window)

    def send(self, window_id: WindowId, letter: Letter) -> None:
        """Joins and leaves."""
        if window_id in self._windows:
            self._windows[window_id].send(letter)

    def forget(self, window_id: WindowId) -> None:
        """The window is over."""
        self._windows.pop(window_id, None)

    async def mend(self) -> None:
        """Nothing can be lost but calls, and those are seen."""

    async def _play(self, window: RemoteWindow) -> AsyncGenerator[Answer, None]:
        yield Opened(self.name)
        async for answer in window.play():
            yield answer

    def _call(self, request: RowRequest) -> AsyncGenerator[RpcEvent, None]:
        return self._open_client().generate(spec_of(request, self._served_name or self._model.names[0]))

    def _open_client(self) -> AsyncClient:
        if self._client is None:
            self._client = self._new_client(self.name, api_key=self._key)
        return self._client

    async def _ask(self) -> Standing | None:
        """How the lane stands; None if it takes no rows now."""
        client = self._open_client()
        try:
            # Each question has its own time. No ``wait_for``: before Python 3.12 it may lose a cancellation.
            async with asyncio.timeout(TIMEOUT_S):
                is_serving = await client.is_serving()
            if not is_serving:
                self._answered("not serving")
                return None
            async with asyncio.timeout(TIMEOUT_S):
                if self._served_name is None and not await self._introduce(client):
                    return None
            async with asyncio.timeout(TIMEOUT_S):
                stats = await client.stats()
        except (CallFailed, TimeoutError) as error:
            if isinstance(error, CallFailed) and error.code == grpc.StatusCode.UNAUTHENTICATED:
                self._answered("refuses our key")
            else:
                await self._note_silence(error)
            return None
        self._answered("ok")
        num_rows = sum(window.num_rows for window in self._windows.values())
        room = stats.room if stats.HasField("room") else max(0, self._max_rows - num_rows)
        return Standing(self.name, stats.running, max(1, num_rows + room), room=room)

    async def _introduce(self, client: AsyncClient) -> bool:
        """Find out whether our model is served there, and by which name."""
        models = [model for model in await client.models() if model.name in self._model.names]
        ours = self._model
        fitting = [
            model
            for model in models
            if model.vocabulary_size == ours.vocab_size and model.max_context >= ours.max_context
        ]
        if not fitting:
            self._answered("another model")
            return False
        self._served_name = fitting[0].name
        return True

    def _answered(self, state: State) -> None:
        self._num_silences = 0
        self._tell(state)

    async def _note_silence(self, error: Exception) -> None:
        """After some of them the lane is lost. So may be the connection: what is asked next takes another."""
        self._num_silences += 1
        if self._num_silences < PATIENCE:
            return
        self._tell("away", error)
        self._served_name = None  # whoever answers next may be another
        for window in self._windows.values():
            window.lose()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _tell(self, state: State, error: Exception | None = None) -> None:
        if state != self.state:
            self.state = state
            level = logging.INFO if state == "ok" else logging.WARNING
            logger.log(level, "remote lane %s: %s%s", self.name, state, f" ({error})" if error else "")
