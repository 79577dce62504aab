"""Failures as gRPC clients see them: a status code, details, and trailing metadata.

Ray's proxy copies code, details and metadata from the context that a message comes with. A method that raises
keeps its code and details at best and loses its metadata, so failures are set on the context, and then
``ClosingStatus`` is given back in place of a message.
"""

import logging
from collections.abc import Mapping
from typing import Any

import grpc
from ray.serve._private.proxy_request_response import ResponseStatus
from ray.serve.grpc_util import RayServegRPCContext

from deployments.observing.account import current
from deployments.openai.errors import (
    InvalidApiKey,
    ModelNotFound,
    PayloadTooLarge,
    RouteNotFound,
    retry_after,
)
from deployments.remote.route import Circular
from deployments.rpc.spec_fields import UnknownField
from dflash_core import errors
from dflash_core.errors import DFlashError, InvalidRequest

logger = logging.getLogger("dflash.rpc")


class Aborted(DFlashError):
    """The caller asked for the end, by another call."""

    kind = "cancelled"


CODES: Mapping[str, grpc.StatusCode] = {
    errors.InvalidRequest.kind: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextLengthExceeded.kind: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound.kind: grpc.StatusCode.NOT_FOUND,
    RouteNotFound.kind: grpc.StatusCode.NOT_FOUND,
    Aborted.kind: grpc.StatusCode.CANCELLED,
    InvalidApiKey.kind: grpc.StatusCode.UNAUTHENTICATED,
    errors.QueueFull.kind: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PayloadTooLarge.kind: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded.kind: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable.kind: grpc.StatusCode.UNAVAILABLE,
    Circular.kind: grpc.StatusCode.UNAVAILABLE,
    UnknownField.kind: grpc.StatusCode.UNIMPLEMENTED,
    errors.LaneFull.kind: grpc.StatusCode.UNAVAILABLE,
    errors.WindowLost.kind: grpc.StatusCode.UNAVAILABLE,
    errors.RowFailed.kind: grpc.StatusCode.INTERNAL,
}
"""Kinds that clients may see. Any other error is a fault of ours, and its message stays inside."""

# Details and metadata travel in one block of headers, of which clients take 8 KiB. A character has up to 12
# bytes there (4 of UTF-8, each as %XX).
_MAX_DETAILS = 400


class ClosingStatus:
    """Stands where a message would: the proxy takes its context over and sends the client none.

    The proxy forwards what ``SerializeToString`` gave, unless it is Ray's own closing object.
    """

    def SerializeToString(self) -> ResponseStatus:  # noqa: N802  (protobuf's name)
        """What Ray calls on every message."""
        return ResponseStatus(code=grpc.StatusCode.OK)


def set_failure(context: RayServegRPCContext, error: Exception) -> None:
    """Put a failure on the context; a fault of ours goes to the log with its trace."""
    request_id = request_id_of(context)
    if isinstance(error, DFlashError) and error.kind in CODES:
        code, kind, details = CODES[error.kind], error.kind, str(error)
    else:
        logger.error("request %s failed", request_id, exc_info=error)
        code, kind = grpc.StatusCode.INTERNAL, DFlashError.kind
        details = f"Internal error. The server's log has it under request id {request_id}."
    if (account := current()) is not None:
        account.error_kind = kind
    metadata = [("error-kind", kind), *_more(error)]
    context.set_code(code)
    context.set_details(details if len(details) <= _MAX_DETAILS else details[: _MAX_DETAILS - 3] + "...")
    context.set_trailing_metadata(metadata)


def _more(error: Exception) -> list[tuple[str, str]]:
    more: list[tuple[str, str]] = []
    if isinstance(error, InvalidRequest) and error.kind in CODES:
        more.append(("error-code", error.code))
        if error.param is not None:
            more.append(("error-param", error.param.encode("ascii", "replace").decode()[:100]))
    seconds = retry_after(error) if isinstance(error, DFlashError) else None
    if seconds is not None:
        more.append(("retry-after", str(seconds)))
    return more


def request_id_of(context: RayServegRPCContext) -> str:
    """The id that Serve gave to the call, or that the client sent; it goes back in the trailing metadata."""
    return dict(context.trailing_metadata()).get("request_id", "")


def metadata_of(context: RayServegRPCContext) -> dict[str, Any]:
    """What the client sent, by lower-case name; values are text, or bytes where the name ends in -bin."""
    return dict(context.invocation_metadata())
