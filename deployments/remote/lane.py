"""One remote lane: the stage over an address, whether it is well, and how many rows it has room for."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import grpc

from deployments.addresses import Address
from deployments.client import AsyncClient, CallFailed, RpcEvent
from deployments.lanes import Standing
from deployments.messages import Answer, Letter, Opened, Opening
from deployments.remote.route import HEADER, Route, Via, best
from deployments.remote.spec import spec_of
from deployments.remote.terms import RemoteTerms
from deployments.remote.window import RemoteWindow
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.spec_fields import fields_before_lists, known_fields
from dflash_core.request import RowRequest, WindowId

logger = logging.getLogger("dflash.remote")

TIMEOUT_S = 2.0  # of one question; across a slow link an answer may take most of a second
PATIENCE = 2  # questions without an answer, one after another, after which its rows go elsewhere

State = Literal[
    "unknown",
    "ok",
    "not serving",
    "away",
    "refuses our key",
    "shows a certificate that is not trusted",
    "another model",
    "serves a shorter context",
    "this very cluster",
    "no targets but by way of this cluster",
]
Hear = Callable[[str, Iterable[Standing], str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """What a lane must serve."""

    names: tuple[str, ...]
    vocab_size: int
    max_context: int  # at least: what fits here is to fit there


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the id of this cluster, the key that it shows, the certificates that it trusts."""

    cluster: str
    key: str | None = None
    ca: bytes | None = None


class RemoteLane:
    """Implements ``burst.Stage``; its windows are made of calls."""

    is_anywhere_open = False

    def __init__(
        self,
        address: str,
        caller: Caller,
        model: Model,
        max_rows: int,
        new_client: Callable[..., AsyncClient] = AsyncClient,
    ):
        """``max_rows`` is what an older server gets that does not tell of its room."""
        self.name = address
        self.state: State = "unknown"
        self.reason = ""  # in more words, where there are any
        self.routes: tuple[Route, ...] = ()  # by way of it, while it is well
        self._caller = caller
        self._model = model
        self._max_rows = max_rows
        self._new_client = new_client
        self._client: AsyncClient | None = None  # it belongs to the event loop that made it
        self._served_name: str | None = None
        self._cluster = ""  # that gave its name
        self._lacks: frozenset[str] = frozenset()
        self._num_silences = 0
        self._windows: dict[WindowId, RemoteWindow] = {}

    @property
    def clusters(self) -> frozenset[str]:
        """Ids of those that it leads to or through."""
        return frozenset(cluster for route in self.routes for cluster in route.clusters)

    async def watch(self, hear: Hear, period_s: float) -> None:
        """Ask again and again how it stands, and tell; ends when cancelled."""
        try:
            while True:
                standing = await self.ask()
                if standing is None:
                    self.routes = ()
                hear(self.name, () if standing is None else (standing,), self.state)
                await asyncio.sleep(period_s)
        finally:
            await self.close()

    async def ask(self) -> Standing | None:
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
                stats = await client.stats(metadata=self._passing())
            async with asyncio.timeout(TIMEOUT_S):
                is_new = self._served_name is None or self._cluster != stats.cluster
                if is_new and not await self._introduce(client, stats.cluster):
                    return None
        except (CallFailed, TimeoutError) as error:
            if isinstance(error, CallFailed) and error.code == grpc.StatusCode.UNAUTHENTICATED:
                self._answered("refuses our key")
            else:
                await self._note_silence(error)
            return None
        return self._standing(stats)

    async def close(self) -> None:
        """Hang up; what asks next calls again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

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
        yield Opened(self.name, is_own=False)
        async for answer in window.play():
            yield answer

    def _call(self, request: RowRequest, via: Via) -> AsyncGenerator[RpcEvent, None]:
        spec = spec_of(request, self._served_name or self._model.names[0])
        return self._open_client().generate(spec, metadata=self._passing(via))

    def _passing(self, via: Via = ()) -> Mapping[str, str]:
        return {HEADER: ",".join((*via, self._caller.cluster))}

    def _open_client(self) -> AsyncClient:
        if self._client is None:
            ca = self._caller.ca if Address.parse(self.name).is_secure else None
            self._client = self._new_client(self.name, api_key=self._caller.key, ca=ca)
        return self._client

    async def _introduce(self, client: AsyncClient, cluster: str) -> bool:
        """Find out whether our model is served there, by which name, and what that server knows."""
        self._served_name = None
        ours = self._model
        same = [
            model
            for model in await client.models()
            if model.name in ours.names and model.vocabulary_size == ours.vocab_size
        ]
        if not same:
            self._answered("another model", f"asked for: {', '.join(ours.names)}")
            return False
        found = max(same, key=lambda model: model.max_context)
        if found.max_context < ours.max_context:
            numbers = f"{found.max_context} tokens there, {ours.max_context} here"
            self._answered(
                "serves a shorter context", f"{numbers}: set max_context: {found.max_context} here"
            )
            return False
        self._served_name, self._cluster = found.name, cluster
        self._lacks = known_fields() - (frozenset(found.obeyed_fields) or fields_before_lists())
        if self._lacks:
            told = ", ".join(sorted(self._lacks))
            logger.warning("remote lane %s: its server is too old for rows with %s", self.name, told)
        return True

    def _standing(self, stats: pb.GetStatsResponse) -> Standing | None:
        num_rows = sum(window.num_rows for window in self._windows.values())
        if stats.cluster == self._caller.cluster:
            self._answered("this very cluster")
            return None
        if stats.cluster:
            told = [Route(tuple(route.clusters), route.room) for route in stats.routes if route.clusters]
        else:  # an older server, which tells of no routes: its address stands for its id
            room = stats.room if stats.HasField("room") else max(0, self._max_rows - num_rows)
            told = [Route((self.name,), room)]
        self.routes = tuple(best(route for route in told if route.is_open((self._caller.cluster,))))
        if not self.routes:
            self._answered("no targets but by way of this cluster")
            return None
        self._answered("ok")
        room = sum(route.room for route in self.routes)
        terms = RemoteTerms(self._caller.cluster, self.routes, self._lacks)
        return Standing(self.name, stats.running, max(1, num_rows + room), room=room, terms=terms)

    def _answered(self, state: State, reason: str = "") -> None:
        self._num_silences = 0
        self._tell(state, reason)

    async def _note_silence(self, error: Exception) -> None:
        """After some of them the lane is lost. So may be the connection: what is asked next takes another."""
        self._num_silences += 1
        if self._num_silences < PATIENCE:
            return
        self._tell("shows a certificate that is not trusted" if _is_distrust(error) else "away", str(error))
        self._served_name = None  # whoever answers next may be another
        for window in self._windows.values():
            window.lose()
        await self.close()

    def _tell(self, state: State, reason: str = "") -> None:
        if state != self.state:
            level = logging.INFO if state == "ok" else logging.WARNING
            logger.log(level, "remote lane %s: %s%s", self.name, state, f" ({reason})" if reason else "")
        self.state, self.reason = state, reason


def _is_distrust(error: Exception) -> bool:
    """gRPC has no code for it, and gives the words of its TLS library."""
    return isinstance(error, CallFailed) and "CERTIFICATE_VERIFY_FAILED" in error.details
