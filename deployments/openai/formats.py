"""What clients may send to say what an answer must be: OpenAI's response formats, and vLLM's fields.

Types only. Whether a schema, an expression or a grammar can be followed is seen when it is compiled.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from dflash_core.text.grammar import MAX_GRAMMAR_BYTES

Json = dict[str, Any]


class Strict(BaseModel):
    """Of a client's request: exact types, finite numbers; what is not known is left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


class TextFormat(Strict):
    """Anything."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema with a name, which is the client's own."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[
        Json | None, Field(alias="schema", description="a JSON Schema; left out: any object")
    ] = None
    strict: Annotated[
        bool | None, Field(description="true: no properties but those named, unless the schema says so")
    ] = None


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format_kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_kind,
        custom_error_type="response_format_type",
        custom_error_message="Input should be an object of type 'text', 'json_object' or 'json_schema'",
    ),
]


def _schema_kind(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


SchemaOrText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Json, Tag("<object>")],
    Discriminator(
        _schema_kind,
        custom_error_type="schema_type",
        custom_error_message="Input should be a JSON schema, as an object or as text",
    ),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class StructuredOutputs(Strict):
    """vLLM's field: one of these. Grammars are llguidance's Lark, its JSON that bundles several, or GBNF."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        asked = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in asked) != 1:
            raise PydanticCustomError(
                "structured_outputs",
                "Give exactly one of 'json', 'regex', 'choice', 'grammar', 'json_object'",
            )
        return self


def as_schema(value: str | Json) -> Json:
    """Return a schema that may have come as text; raises ``ValueError``."""
    if isinstance(value, str):
        value = from_json(value, allow_inf_nan=False)
    if not isinstance(value, dict):
        raise ValueError("it should be a JSON object")
    return value
