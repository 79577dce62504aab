"""smg's messages, made to travel: their classes name a module that does not exist, so pickle finds none.

Serve pickles a request between its proxy and our replica. Both import this module, which pickles these
messages by their wire format.
"""

import copyreg
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2, mlx_engine_pb2_grpc

_SERVICE = mlx_engine_pb2.DESCRIPTOR.services_by_name["MlxEngine"]


def _classes() -> Iterator[type[Message]]:
    for method in _SERVICE.methods:
        for descriptor in (method.input_type, method.output_type):
            yield GetMessageClass(descriptor)


_BY_NAME = {found.DESCRIPTOR.full_name: found for found in _classes()}


def _parse(name: str, wire: bytes) -> Message:
    return _BY_NAME[name].FromString(wire)


def _reduce(message: Message) -> tuple[Any, tuple[str, bytes]]:
    return _parse, (message.DESCRIPTOR.full_name, message.SerializeToString())


for _class in _BY_NAME.values():
    copyreg.pickle(_class, _reduce)  # type: ignore[arg-type]

# The messages' types are built at run time from descriptors; their stubs type fields, not every use.
pb: Any = mlx_engine_pb2
common: Any = common_pb2


def add_servicer_to_server(servicer: Any, server: Any) -> None:
    """What Serve's proxy calls to learn of the service."""
    mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(servicer, server)
