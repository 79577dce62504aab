"""Bytes of a body to a schema, every mistake an ``InvalidRequest`` that names its field."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from dflash_core.errors import InvalidRequest

Schema = TypeVar("Schema", bound=BaseModel)


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse what is not JSON, or packed: a few bytes can unpack to any number of them."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            "The body must not be compressed: leave 'content-encoding' out.", code="invalid_content_encoding"
        )
    _check_content_type(headers.get("content-type"))


def _check_content_type(value: str | None) -> None:
    # Forms and plain text are what a foreign web page could post unasked.
    if value is None:
        return
    media_type = value.partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return
    raise InvalidRequest(
        "The body must be JSON: send 'content-type: application/json'.", code="invalid_content_type"
    )


def parse_body(body: bytes, schema: type[Schema]) -> Schema:
    """Read a body. Depth, digits of a number and surrogates are bounded by the JSON reader."""
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return parse_document(document, schema)


def parse_document(document: dict[str, object], schema: type[Schema]) -> Schema:
    """Check a JSON object against a schema."""
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise _translate(
            error.errors(include_url=False, include_context=False, include_input=False)[0]
        ) from None


# Where the library speaks of Python to people who sent JSON.
_WORDS = {"model_type": "Input should be an object", "dict_type": "Input should be an object"}


def _translate(details: ErrorDetails) -> InvalidRequest:
    param = dotted(details["loc"])
    if details["type"] == "missing":
        return InvalidRequest(f"You must provide '{param}'.", param=param, code="missing_required_parameter")
    message = _WORDS.get(details["type"], details["msg"])
    if not param:  # the body as a whole
        return InvalidRequest(f"Invalid body: {message}.", code="invalid_value")
    return InvalidRequest(f"Invalid '{param}': {message}.", param=param, code="invalid_value")


def dotted(location: Sequence[int | str]) -> str:
    """Write a path as OpenAI does: ``messages[0].content``; tags of unions are not part of it."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path
