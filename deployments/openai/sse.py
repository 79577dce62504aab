"""Server-sent events: the bytes of a stream."""

import json
from collections.abc import Mapping

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the stream otherwise
}

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"


def frame(data: Mapping[str, object]) -> bytes:
    """Return one event. JSON escapes line breaks, so one ``data`` line is always enough."""
    return b"data: " + encode(data) + b"\n\n"


def typed_frame(data: Mapping[str, object]) -> bytes:
    """Return one event that is named after its ``type``."""
    return b"event: " + str(data["type"]).encode() + b"\n" + frame(data)


def encode(data: Mapping[str, object]) -> bytes:
    """Return compact JSON."""
    return _COMPACT.encode(data).encode()


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
