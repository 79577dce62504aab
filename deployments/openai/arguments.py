"""Arguments that a template writes as bare text: which types a schema allows them, and what they then are.

``<parameter=days>`` holds ``3`` or ``Zürich`` without quotes, so the schema alone tells text from JSON.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Any  # an object, true or false
ALL_KINDS = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_DEPTH = 16  # of references and alternatives


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Types of JSON that ``schema``, a part of ``root``, may allow."""
    allowed: frozenset[str] = frozenset()
    for branch in branches(schema, root):
        allowed |= _own_kinds(branch)
    return allowed


def branches(schema: Schema, root: Schema, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema, references followed; one that nests too deeply allows anything.

    Raises ``ValueError`` where there is something else than a schema.
    """
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"{str(schema)[:64]!r} is no schema")
    if schema is False:
        return
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        yield {}
        return
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf")}
    inner: list[Schema] = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if "$ref" in schema:
        inner.append(_referred(schema["$ref"], root))
    if not inner:
        yield schema
    for part in inner:
        for branch in branches(part, root, depth + 1):
            yield {**rest, **branch}


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    allowed = ALL_KINDS
    if "type" in schema:
        named = schema["type"]
        allowed &= {named} if isinstance(named, str) else frozenset(named)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        if not isinstance(values, list):
            raise ValueError("'enum' should be a list")
        allowed &= frozenset(kind for value in values for kind in _kinds_of(value))
    for part in schema.get("allOf", ()):
        if isinstance(part, Mapping):
            allowed &= _own_kinds(part)
    return allowed


def _kinds_of(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _referred(reference: object, root: Schema) -> Schema:
    """What ``#/$defs/X`` points at; anything else allows anything here."""
    found: Any = root
    path = reference.split("/") if isinstance(reference, str) else []
    if not path or path[0] != "#":
        return True
    for step in path[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return True
        found = found[name]
    return found


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, each text that can be none read as the JSON that it spells."""
    properties = schema.get("properties") or {}

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, str) or name not in properties:
            return value
        if "string" in kinds(properties[name], schema):
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    return {name: read(name, value) for name, value in arguments.items()}
