"""What a request says its answer must be, as a part of a grammar."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from deployments.openai.formats import Json, JsonObjectFormat, JsonSchemaFormat, as_schema
from deployments.openai.schema import GenerationRequest
from dflash_core.errors import InvalidRequest

ANY_OBJECT: Json = {"type": "object"}
# Between JSON's tokens, besides none: what people write, and nothing that a model could lose itself in.
_SPACE = r"( |\r?\n[ \t]{0,40})"


@dataclass(frozen=True, slots=True)
class Structure:
    """Grammars in llguidance's own words: ``{"json_schema": ...}`` or ``{"lark_grammar": ...}``."""

    param: str  # the field of the request that asks for it
    grammars: list[Json]  # the first is the answer's, and may use the others by name


def structure_of(request: GenerationRequest) -> Structure | None:
    """Return what the answer must be, None for anything; raises ``InvalidRequest``."""
    asked = list(_asked(request))
    if len(asked) > 1:
        names = " and ".join(f"'{param}'" for param, _ in asked)
        raise InvalidRequest(f"Give only one of {names}.", param=asked[1][0], code="invalid_value")
    for param, write in asked:
        try:
            written = write()
            return Structure(param, written if isinstance(written, list) else [written])
        except Exception as error:  # a converter of somebody else's, fed with whatever a client wrote
            raise InvalidRequest(f"Invalid '{param}': {error}.", param=param, code="invalid_value") from None
    return None


_Writer = Callable[[], Json | list[Json]]


def _asked(request: GenerationRequest) -> Iterator[tuple[str, _Writer]]:
    match request.response_format:
        case JsonObjectFormat():
            yield "response_format", lambda: json_part(ANY_OBJECT)
        case JsonSchemaFormat(json_schema=named):
            schema = ANY_OBJECT if named.schema_ is None else named.schema_
            closes = bool(named.strict)
            yield (
                "response_format.json_schema.schema",
                lambda: json_part(closed(schema) if closes else schema),
            )
        case _:
            pass
    outputs = request.structured_outputs
    if outputs is not None:
        json_ = ANY_OBJECT if outputs.json_object else outputs.json_
        yield from _vllm("structured_outputs.", json_, outputs.regex, outputs.choice, outputs.grammar)
    yield from _vllm(
        "guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar
    )


def _vllm(
    prefix: str, schema: str | Json | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, _Writer]]:
    if schema is not None:
        yield f"{prefix}json", lambda: json_part(as_schema(schema))
    if regex is not None:
        yield f"{prefix}regex", lambda: regex_part(regex)
    if choice is not None:
        yield f"{prefix}choice", lambda: choice_part(choice)
    if grammar is not None:
        yield f"{prefix}grammar", lambda: grammar_parts(grammar)


def json_part(schema: Json) -> Json:
    """JSON that a schema describes."""
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _SPACE}}}


def grammar_parts(grammar: str) -> Json | list[Json]:
    """A grammar as it was written: several in llguidance's JSON, or one in Lark or GBNF."""
    if grammar.lstrip().startswith("{"):
        parts = as_schema(grammar).get("grammars")
        if not isinstance(parts, list) or not parts:
            raise ValueError("its JSON should have a list of 'grammars'")
        return parts
    return {"lark_grammar": any_to_lark(grammar)}


def regex_part(regex: str) -> Json:
    """A text that an expression matches as a whole."""
    (part,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return {"lark_grammar": part["lark_grammar"]}


def choice_part(choices: list[str]) -> Json:
    """One of several texts. A single lexeme: where one begins with another, both can be said."""
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, choices))}"}


def quoted(text: str) -> str:
    """Return a text as Lark spells it."""
    return json.dumps(text, ensure_ascii=False)


def closed(schema: Json) -> Json:
    """The schema in which every object has no properties but those it names, unless it says otherwise.

    OpenAI's strict mode asks clients to write that; here leaving it out means the same.
    """
    schema = copy.deepcopy(schema)
    for part in _subschemas(schema):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema


# Where schemas have schemas in them. Not in ``allOf``: its parts name properties for one another.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def _subschemas(schema: object) -> Iterator[Json]:
    if not isinstance(schema, dict):
        return
    yield schema
    parts: list[Any] = [schema.get(key) for key in _SINGLE]
    for key in _NAMED:
        named = schema.get(key)
        parts += named.values() if isinstance(named, dict) else ()
    for key in _LISTED:
        listed = schema.get(key)
        parts += listed if isinstance(listed, list) else ()
    for part in parts:
        yield from _subschemas(part)
