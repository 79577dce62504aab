"""How Serve's gRPC proxy learns of our services: by functions that it imports by name.

gRPC itself answers bytes that are no message with an INTERNAL of its own. Here they become an ``Unreadable``,
which travels to the replica like any request, and there is the client's fault.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from deployments.rpc.dflash.v1.dflash_pb2 import GenerateRequest
from deployments.rpc.dflash.v1.dflash_pb2_grpc import add_DFlashServiceServicer_to_server
from deployments.rpc.options import OUR_SERVICE
from dflash_core.errors import InvalidRequest

Deserializer = Callable[[bytes], Any]


class Unreadable:
    """Stands for a message that could not be read; whoever looks into it raises ``InvalidRequest``."""

    def __init__(self, meant_for: str):
        """``meant_for``: the full name of the service that was called."""
        self.meant_for = meant_for

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by pickle, not by a handler
            raise AttributeError(name)
        raise InvalidRequest("The message is not what this method takes: it cannot be read.")


def is_ours(request: Any) -> bool:
    """Whether this is a ``Generate`` of our own contract: two have one, and their requests tell which."""
    if isinstance(request, Unreadable):
        return request.meant_for == OUR_SERVICE
    return isinstance(request, GenerateRequest)


def add_dflash(servicer: Any, server: Any) -> None:
    """Register ``dflash.v1.DFlashService``."""
    add_DFlashServiceServicer_to_server(servicer, Tolerant(server))


def add_mlx_engine(servicer: Any, server: Any) -> None:
    """Register ``mlx.grpc.engine.MlxEngine``, where its messages are installed."""
    from deployments.rpc.mlx_messages import add_servicer_to_server

    add_servicer_to_server(servicer, Tolerant(server))


class Tolerant:
    """A server whose methods get an ``Unreadable`` where gRPC would have given up."""

    def __init__(self, server: Any):
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """See ``grpc.Server``; generated code calls this one."""
        for handler in handlers:
            handler._method_handlers = _tolerant(handler.service_name(), handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """See ``grpc.Server``; newer generated code calls this one too."""
        self._server.add_registered_method_handlers(service_name, _tolerant(service_name, handlers))


def _tolerant(service_name: str, handlers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: handler._replace(request_deserializer=_reading(handler.request_deserializer, service_name))
        for name, handler in handlers.items()
    }


def _reading(deserialize: Deserializer, service_name: str) -> Deserializer:
    def read(wire: bytes) -> Any:
        try:
            return deserialize(wire)
        except (DecodeError, ValueError, RecursionError):
            return Unreadable(service_name)

    return read
