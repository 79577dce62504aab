"""Serve's HTTP and gRPC endpoints: started for us, or found running as we want them."""

import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from deployments.cluster import hushed
from deployments.listening import host_port
from deployments.rpc.options import grpc_options
from deployments.settings import Settings
from dflash_core.errors import Unavailable

if TYPE_CHECKING:
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.config import gRPCOptions


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where Serve listens, and what its gRPC proxy knows. Fixed while it runs."""

    host: str | None  # None: no HTTP
    http_port: int
    grpc_port: int
    grpc_functions: frozenset[str]  # none: no gRPC

    @classmethod
    def wanted(cls, settings: Settings) -> "Endpoints":
        """Those that the settings ask for."""
        functions = grpc_options(settings.grpc_port)["grpc_servicer_functions"]
        return cls(settings.host, settings.http_port, settings.grpc_port, frozenset(functions))

    @classmethod
    def found(cls, client: "ServeControllerClient") -> "Endpoints":
        """Those of the Serve that runs."""
        import ray

        http = client.http_config
        rpc = cast("gRPCOptions", ray.get(client._controller.get_grpc_config.remote()))
        return cls(http.host, http.port, rpc.port, frozenset(rpc.grpc_servicer_functions))

    def serve(self, wanted: "Endpoints") -> bool:
        """Whether the wanted ones are among these; services of others do no harm."""
        own = (self.host, self.http_port, self.grpc_port)
        return own == (wanted.host, wanted.http_port, wanted.grpc_port) and (
            wanted.grpc_functions <= self.grpc_functions
        )

    def __str__(self) -> str:
        http = f"HTTP at {host_port(self.host, self.http_port)}" if self.host else "no HTTP"
        functions = ", ".join(sorted(self.grpc_functions))
        return f"{http}, " + (f"gRPC on port {self.grpc_port} ({functions})" if functions else "no gRPC")

    def command(self) -> str:
        """What starts a Serve that has them."""
        words = ["serve", "start", "--http-host", str(self.host), "--http-port", str(self.http_port)]
        words += ["--grpc-port", str(self.grpc_port)]
        for name in sorted(self.grpc_functions):
            words += ["--grpc-servicer-functions", name]
        return shlex.join(words)


@contextmanager
def endpoints(settings: Settings, say: Callable[[str], None], *, takes_any: bool) -> Iterator[None]:
    """Use the Serve that runs if it has what the settings ask for, else start one.

    Stops it only if it was not there. Raises Unavailable if what runs is another, unless ``takes_any``.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our own lines tell how far it is
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        if not takes_any:
            refuse_others(Endpoints.found(client), Endpoints.wanted(settings))
        yield
        return
    say(
        f"starting Serve on {host_port(settings.host, settings.http_port)}, gRPC on port {settings.grpc_port}"
    )
    serve.start(
        http_options={"host": settings.host, "port": settings.http_port},
        grpc_options=grpc_options(settings.grpc_port),
    )
    try:
        yield
    finally:
        _stop(settings, say)


def refuse_others(found: Endpoints, wanted: Endpoints) -> None:
    """Raise Unavailable if the Serve that runs is not the one that is wanted."""
    if not found.serve(wanted):
        raise Unavailable(
            f"Serve already runs on this cluster with {found}; asked for: {wanted}. These are fixed while "
            f"it runs: ask for the same, or stop it and let `up` start its own, or say: {wanted.command()}"
        )


def _stop(settings: Settings, say: Callable[[str], None]) -> None:
    """Shut Serve down, unless others have come to a cluster that stays."""
    from ray import serve

    with hushed():
        found = serve.status().applications if settings.address is not None else {}
        others = sorted(name for name, app in found.items() if app.status != "DELETING")
        if not others:
            serve.shutdown()
    if others:
        say(f"Serve goes on: it runs {', '.join(others)}")
