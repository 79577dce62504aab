"""The exception tree. Each leaf has a stable ``kind``, shared by HTTP bodies, gRPC metadata and metrics.

DFlashError
├── InvalidRequest            the client must change the request
│   └── ContextLengthExceeded
├── CheckpointError           a model on disk cannot be used
├── QueueFull                 no room now; try again after ``retry_after`` seconds
├── LaneFull                  this target replica holds all the windows it may
├── WindowLost                state of a window is gone; reopen and continue
├── DeadlineExceeded          the request's time is over
├── RowFailed                 one row cannot go on (non-finite logits, ...); others are untouched
└── Unavailable               loading or draining
"""


class DFlashError(Exception):
    """Base of every error that this project raises on purpose."""

    kind = "internal_error"


class InvalidRequest(DFlashError):
    """The request is malformed; ``param`` names the offending field."""

    kind = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code or self.kind

    def __reduce__(self):
        return _rebuild_invalid, (type(self), str(self), self.param, self.code)


def _rebuild_invalid(
    cls: "type[InvalidRequest]", message: str, param: str | None, code: str
) -> "InvalidRequest":
    return cls(message, param=param, code=code)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the model's context."""

    kind = "context_length_exceeded"


class CheckpointError(DFlashError):
    """A checkpoint cannot be used: names the key, the value found and what was expected.

    What is named comes from a stranger's file, and goes to terminals and logs: the message is cut to a
    bearable length, and a character that prints nothing is shown by its number.
    """

    kind = "checkpoint_error"

    def __init__(self, message: str):
        super().__init__(_legible(message))


_MAX_MESSAGE = 2000  # characters


def _legible(message: str) -> str:
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    if message.isprintable():
        return message
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message
    )


class QueueFull(DFlashError):
    """The router's bounded queue has no room; ``retry_after`` is in seconds."""

    kind = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self):
        return _rebuild_queue_full, (str(self), self.retry_after)


def _rebuild_queue_full(message: str, retry_after: float) -> QueueFull:
    return QueueFull(message, retry_after=retry_after)


class LaneFull(DFlashError):
    """The target replica already plays all the windows it may."""

    kind = "lane_full"


class WindowLost(DFlashError):
    """State of a window is gone (evicted, restarted or moved); reopen it and continue."""

    kind = "window_lost"


class DeadlineExceeded(DFlashError):
    """The request's deadline passed before it finished."""

    kind = "deadline_exceeded"


class RowFailed(DFlashError):
    """One row cannot go on; rows beside it are untouched."""

    kind = "row_failed"


class Unavailable(DFlashError):
    """The server is loading or draining."""

    kind = "unavailable"
