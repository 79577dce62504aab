"""The OpenAPI document: bodies are parsed by hand, so their schemas are put in by hand."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from deployments.openai.errors import ErrorBody
from deployments.openai.responses.schema import ResponsesRequest
from deployments.openai.schema import ChatRequest, CompletionRequest
from deployments.openai.tokenizing import DetokenizeRequest, TokenizeRequest

_BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def document_bodies(app: FastAPI) -> None:
    """Make ``app.openapi()`` tell what the endpoints take and how they fail."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _add_bodies(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _add_bodies(document: dict[str, Any]) -> None:
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):  # never sent
        schemas.pop(name, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path in _BODIES:
                reference = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                }


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "The request is wrong; `param` names the field."),
        (401, "No valid API key."),
        (404, "The model is not served here."),
        (408, "The deadline passed."),
        (413, "The body is too large."),
        (429, "The queue is full; `retry-after` says when to come back."),
        (500, "The row failed, or an internal error."),
        (503, "Loading or draining."),
    )
}
