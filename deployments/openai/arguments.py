"""Arguments that a template writes as bare text: which types a schema allows them, and what they then are.

``<parameter=days>`` holds ``3`` or ``Zürich`` without quotes, so the schema alone tells text from JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

Schema = Any  # an object, true or false
ALL_KINDS = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_BRANCHING = frozenset({"$ref", "anyOf", "oneOf"})
_MAX_DEPTH = 16  # of references and alternatives
_MAX_BRANCHES = 64


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Types of JSON that ``schema``, a part of ``root``, may allow."""
    allowed: frozenset[str] = frozenset()
    for branch in branches(schema, root):
        allowed |= _own_kinds(branch)
    return allowed


def branches(schema: Schema, root: Schema) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, references followed; a schema with too many of them allows anything.

    Raises ``ValueError`` where there is something else than a schema.
    """
    found: list[Mapping[str, Any]] = []
    rest: list[tuple[Schema, Mapping[str, Any], int]] = [(schema, {}, 0)]
    while rest:
        part, outer, depth = rest.pop()
        if not isinstance(part, Mapping | bool):
            raise ValueError(f"{str(part)[:64]!r} is no schema")
        if depth > _MAX_DEPTH or len(found) + len(rest) > _MAX_BRANCHES:
            return [{}]
        if isinstance(part, bool):
            found += [outer] if part else []
            continue
        inner = [*part.get("anyOf", ()), *part.get("oneOf", ())]
        if "$ref" in part:
            inner.append(_referred(part["$ref"], root))
        own = {**outer, **{key: value for key, value in part.items() if key not in _BRANCHING}}
        if inner:
            rest += [(one, own, depth + 1) for one in reversed(inner)]
        else:
            found.append(own)
    return found


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
