"""A TCP relay that delays, holds back or cuts what passes: the network between two clusters, as it may be."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Listens on a port of its own and passes on to another. Every write waits ``delay_s`` on its way."""

    def __init__(self, port: int, delay_s: float = 0.0):
        self.delay_s = delay_s
        self.num_connections = 0
        self._port = port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Pass on nothing more, and say nothing of it: a cable that is out."""
        self._is_open.clear()

    def release(self) -> None:
        self._is_open.set()

    async def cut(self) -> None:
        """Reset all connections, and take no new ones."""
        assert self._server is not None
        self._server.close()
        self.break_connections()

    def break_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass(reader, far_writer))
            group.create_task(self._pass(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps the order and the pace: what comes close together goes close together, later."""
        loop, parcels = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def send() -> None:
            while True:
                due, data = await parcels.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._is_open.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        sender = asyncio.ensure_future(send())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                parcels.put_nowait((loop.time() + self.delay_s, data))
            parcels.put_nowait((loop.time() + self.delay_s, b""))
        with contextlib.suppress(ConnectionError):
            await sender
        sender.cancel()
        writer.transport.abort()


@asynccontextmanager
async def relay_to(port: int, delay_s: float = 0.0) -> AsyncIterator[Relay]:
    relay = Relay(port, delay_s)
    relay._server = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
    try:
        yield relay
    finally:
        relay.release()
        await relay.cut()
