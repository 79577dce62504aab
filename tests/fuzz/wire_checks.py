"""What must hold for whatever comes over HTTP and gRPC."""

from typing import Any

from google.protobuf.message import DecodeError

from deployments.http import OPEN_PATHS
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.mlx_messages import pb as mlx
from tests.fuzz import edges, strategies

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/responses")


def http_document(asked: tuple[str, Any]) -> None:
    """Any JSON object, to any of the four that read one."""
    body = strategies.dumped(asked[1])
    edges.check_http(edges.post(asked[0], body), body)


def http_bytes(body: bytes) -> None:
    """Any bytes; the first chooses the path."""
    path = PATHS[body[0] % len(PATHS)] if body else PATHS[0]
    edges.check_http(edges.post(path, body[1:]), body)


def http_head(asked: tuple[str, str, list[tuple[bytes, bytes]], bool]) -> None:
    """Any method, path and headers, with and without keys."""
    method, path, headers, is_locked = asked
    answer = edges.request(method, path, headers, b"{}", is_locked=is_locked)
    sent = path.encode(errors="surrogatepass") + b"".join(value for _, value in headers)
    edges.check_http(answer, sent)
    if is_locked and path not in OPEN_PATHS and method != "OPTIONS":
        assert answer.status == 401


def grpc_message(asked: tuple[str, Any]) -> None:
    """Any message of either contract."""
    method, message = asked
    edges.check_grpc(edges.call(method, message), message.SerializeToString())


def grpc_bytes(wire: bytes) -> None:
    """Any bytes that are a message; what is none is the servicers' own test."""
    methods = [
        ("Generate", pb.GenerateRequest),
        ("GenerateOnce", pb.GenerateOnceRequest),
        ("Smg", mlx.GenerateRequest),
    ]
    method, make = methods[wire[0] % 3] if wire else methods[0]
    message = make()
    try:
        message.ParseFromString(wire[1:])
    except DecodeError:
        return
    edges.check_grpc(edges.call(method, message), wire)
