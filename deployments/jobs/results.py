"""The output of a batch: one result a line, as OpenAI's batch results have them.

A line is *answered* if the server's status was 200. Any other is *failed*: with the server's own body as
``response``, or, where there was no answer at all, with an ``error`` of ours.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from deployments.jobs.requests import BadLine, Request


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server said to one request."""

    status: int
    body: dict[str, Any]
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the output."""

    custom_id: str | None
    is_answered: bool
    document: dict[str, Any]

    def encode(self) -> bytes:
        """The line, with its end."""
        try:
            return json.dumps(self.document, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape and UTF-8 cannot hold
            return json.dumps(self.document).encode() + b"\n"


def of_reply(request: Request, reply: Reply) -> Result:
    """The result of a request that the server answered, well or not."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    return _result(request.custom_id, response, None)


def of_failure(line: Request | BadLine, code: str, message: str) -> Result:
    """The result of a line without an answer."""
    return _result(line.custom_id, None, {"code": code, "message": message, "line": line.number})


def _result(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> Result:
    document = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
    return of_document(document | {"response": response, "error": error})


def of_document(document: dict[str, Any]) -> Result:
    """Read a result back. Raises ValueError if this is none."""
    try:
        custom_id, response, error = document["custom_id"], document["response"], document["error"]
        is_answered = error is None and response["status_code"] == 200
    except (KeyError, TypeError):
        raise ValueError("not a batch result") from None
    if not isinstance(custom_id, str | None):
        raise ValueError("not a batch result: its custom_id is no string")
    if not isinstance(error, dict | None) or (
        error is not None and not isinstance(error.get("line"), int | None)
    ):
        raise ValueError("not a batch result: its error is none of ours")
    return Result(custom_id, is_answered, document)


def parse(line: bytes) -> Result:
    """Read a line of a batch's output. Raises ValueError if this is none."""
    try:
        return of_document(json.loads(line))
    except RecursionError:
        raise ValueError("not a batch result: nested too deeply") from None
