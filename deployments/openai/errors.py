"""The table of failures: kind → (status, OpenAI type), and the body that clients parse."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from dflash_core.errors import DFlashError, InvalidRequest, QueueFull, Unavailable


class InvalidApiKey(DFlashError):
    """No key, or one that is not in the set."""

    kind = "invalid_api_key"


class ModelNotFound(InvalidRequest):
    """The model asked for is not served here."""

    kind = "model_not_found"


class RouteNotFound(DFlashError):
    """No such path here."""

    kind = "not_found"


class MethodNotAllowed(DFlashError):
    """The path exists, not with this method."""

    kind = "method_not_allowed"


class PayloadTooLarge(DFlashError):
    """The body exceeds the limit of the server."""

    kind = "payload_too_large"


class BodyTimeout(DFlashError):
    """The body did not arrive in time."""

    kind = "request_timeout"


class ErrorDetail(TypedDict):
    """The object that OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """A body that reports a failure; also the data of a stream's error event."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as a client sees it."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str]


_INVALID = "invalid_request_error"
_SERVER = "server_error"

# What has no row here is a fault of ours: its message stays inside.
_ROWS: Mapping[str, tuple[int, str]] = {
    "invalid_request": (400, _INVALID),
    "context_length_exceeded": (400, _INVALID),
    "invalid_api_key": (401, "authentication_error"),
    "model_not_found": (404, _INVALID),
    "not_found": (404, _INVALID),
    "method_not_allowed": (405, _INVALID),
    "deadline_exceeded": (408, "timeout_error"),  # as Ray's proxy says it; SDKs retry both 408 and 504
    "request_timeout": (408, "timeout_error"),
    "payload_too_large": (413, _INVALID),
    "queue_full": (429, "rate_limit_error"),
    "row_failed": (500, _SERVER),
    "lane_full": (503, _SERVER),
    "window_lost": (503, _SERVER),
    "unavailable": (503, _SERVER),
}

_RETRY_AFTER_S = 5.0
_MAX_MESSAGE, _MAX_PARAM = 1000, 200  # characters


def is_fault(error: Exception) -> bool:
    """Tell whether this is a bug of ours, to be logged with its trace and not shown."""
    return not (isinstance(error, DFlashError) and error.kind in _ROWS)


def failure_of(error: Exception, request_id: str) -> Failure:
    """Translate any exception; one that is not in the table shows nothing but the request id."""
    if not isinstance(error, DFlashError) or error.kind not in _ROWS:
        message = f"Internal error. The server's log has it under request id {request_id}."
        return Failure(500, _body(message, _SERVER, None, DFlashError.kind), {})
    status, type_ = _ROWS[error.kind]
    param, code = None, error.kind
    if isinstance(error, InvalidRequest):
        param, code = error.param and _short(error.param, _MAX_PARAM), error.code
    return Failure(status, _body(_short(str(error), _MAX_MESSAGE), type_, param, code), _headers(error))


def _short(text: str, most: int) -> str:
    """What a client wrote may be in the text, megabytes of it, and is not sent back whole."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _body(message: str, type_: str, param: str | None, code: str) -> ErrorBody:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _headers(error: DFlashError) -> dict[str, str]:
    seconds = retry_after(error)
    if seconds is not None:
        return {"retry-after": str(seconds)}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, BodyTimeout):
        return {"connection": "close"}  # what is still to come of the body is no next request
    return {}


def retry_after(error: DFlashError) -> int | None:
    """Seconds after which trying again may help; None where it would not."""
    if isinstance(error, QueueFull):
        seconds = error.retry_after
    elif isinstance(error, Unavailable):
        seconds = getattr(error, "retry_after", _RETRY_AFTER_S)
    elif _ROWS.get(error.kind, (500, ""))[0] == 503:
        seconds = 1.0
    else:
        return None
    return max(1, math.ceil(seconds))
