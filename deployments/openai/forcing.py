"""Calls that must come, as rules of a grammar in the template's own syntax.

What a template's examples look like is what its model has learned, so calls are written that way and no
other: Qwen's tagged parameters, each on lines of its own, or one JSON object between the markers.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.generation import Tokenizer
from deployments.openai.arguments import branches, kinds
from deployments.openai.schema import ChatRequest, ChosenTool, FunctionSpec
from deployments.openai.structure import json_part, quoted
from deployments.openai.tools import UNTYPED, calling_of
from dflash_core.errors import InvalidRequest

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
Schema = Mapping[str, Any]
_Writer = Callable[
    [FunctionSpec, int], tuple[str, list[str]]
]  # what stands between the markers, and its rules


def is_forced(request: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, ChosenTool)


def can_write(request: ChatRequest, tokenizer: Tokenizer) -> bool:
    """Whether this model's calls can be told to a grammar, and ``request`` lets the model make some."""
    calling = calling_of(request, tokenizer)
    return calling is not None and calling.format.name in _WRITERS


def call_rules(request: ChatRequest, tokenizer: Tokenizer) -> list[str]:
    """Rules in Lark, the first named ``calls``: one call of an allowed tool, or several.

    Raises ``InvalidRequest`` where this model's calls cannot be forced, or a tool cannot be written.
    """
    calling = calling_of(request, tokenizer)
    assert calling is not None
    write = _WRITERS.get(calling.format.name)
    if write is None:
        raise InvalidRequest(
            '\'tool_choice\' can only be "auto" or "none" here: how this model\'s template writes calls is '
            "not known well enough to force one.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    choice = request.tool_choice
    chosen = choice.function.name if isinstance(choice, ChosenTool) else None
    numbers = [i for i, tool in enumerate(request.tools or ()) if chosen in (None, tool.function.name)]
    is_single = chosen is not None or not calling.is_parallel
    start, end = marker(calling.format.start, tokenizer), marker(calling.format.end, tokenizer)
    rules = [
        "calls: call" if is_single else 'calls: call ("\\n"? call)*',
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    for number in numbers:
        body, more = _written(write, (request.tools or [])[number].function, number)
        rules += [f"call_{number}: {start} {body} {end}", *more]
    return rules


def _written(write: "_Writer", function: FunctionSpec, number: int) -> tuple[str, list[str]]:
    try:
        return write(function, number)
    except InvalidRequest:
        raise
    except Exception as error:  # a schema may be anything, and what it should be is found out by reading it
        param = f"tools[{number}].function.parameters"
        raise InvalidRequest(
            f"Invalid '{param}': this is no JSON schema ({error}).", param=param, code="invalid_value"
        ) from None


def marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker in Lark: the token that it is, else its text."""
    ids = tokenizer.encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 and text in tokenizer.text_markers else quoted(text)


def _as_json(function: FunctionSpec, number: int) -> tuple[str, list[str]]:
    """``{"name": ..., "arguments": {...}}`` on a line between the markers."""
    schema = {**(function.parameters or _NO_ARGUMENTS), "type": "object"}
    if schema.get("properties"):
        schema.setdefault("additionalProperties", False)
    head = quoted(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
    return f'{head} arguments_{number} "}}\\n"', [f"arguments_{number}: {_json(schema)}"]


def _as_tags(function: FunctionSpec, number: int) -> tuple[str, list[str]]:
    """``<function=name>`` and a ``<parameter=name>`` for each argument, those that may be left out too."""
    schema = function.parameters or _NO_ARGUMENTS
    required = schema.get("required") or ()
    _require_plain(function.name, number)
    body, rules = [quoted(f"\n<function={function.name}>\n")], []
    for place, (name, part) in enumerate((schema.get("properties") or {}).items()):
        rule = f"parameter_{number}_{place}"
        is_optional = name not in required
        if not _is_plain(name) and is_optional:
            continue
        _require_plain(name, number)
        body.append(f"{rule}?" if is_optional else rule)
        rules += _parameter(rule, name, part, schema)
    return " ".join([*body, quoted("</function>\n")]), rules


_WRITERS: Mapping[str, _Writer] = {
    UNTYPED: _as_tags,
    "json_tools": _as_json,
}


def _is_plain(name: str) -> bool:
    return bool(name) and not any(c.isspace() or c in "<>" for c in name)


def _require_plain(name: str, number: int) -> None:
    if not _is_plain(name):
        raise InvalidRequest(
            f"This model's calls cannot be forced with the name {name[:64]!r}: "
            "it may hold no space, '<' or '>'.",
            param=f"tools[{number}].function",
            code="invalid_value",
        )


def _parameter(rule: str, name: str, schema: Any, root: Schema) -> Iterator[str]:
    """Text as it is, up to the closing tag; all else as JSON."""
    allowed = kinds(schema, root)
    head, tail = quoted(f"<parameter={name}>\n"), quoted("\n</parameter>\n")
    yield f"{rule}: {head} {rule}_value"
    if "string" not in allowed:
        yield f"{rule}_value: {rule}_json {tail}"
        yield f"{rule}_json: {_json(_standalone(schema, root))}"
        return
    texts = [_text(branch, may_be_null="null" in allowed) for branch in branches(schema, root)]
    if "null" in allowed:
        texts.append('"null"')
    terminal = f"{rule}_text".upper()
    yield f"{rule}_value[suffix={tail}]: {terminal}"
    yield f"{terminal}: " + " | ".join(f"({text})" for text in texts if text)


# What the reader would take for the end of the value, or of the call.
_NO_TAG = r"~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"
_NO_NULL = "~/(?i:null)/"  # which the reader takes for none


def _text(schema: Schema, *, may_be_null: bool) -> str:
    """A terminal for the texts of one alternative; empty if it has none. ``format`` is left to the model."""
    if "string" not in kinds(schema, schema):
        return ""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return " | ".join(quoted(value) for value in values if isinstance(value, str))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.){{{least},{most}}}/" if least or most != "" else "/(?s:.*)/"]
    if "pattern" in schema:
        parts.append(f"/{_whole(schema['pattern'])}/")
    parts += [_NO_TAG] if may_be_null else [_NO_TAG, _NO_NULL]
    return " & ".join(parts)


def _whole(pattern: str) -> str:
    """An expression for all texts in which ``pattern`` is found, as Lark spells it."""
    head = "" if pattern.startswith("^") else "(?s:.*)"
    is_ended = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")[: -1 if is_ended else None]
    whole = f"{head}({inner}){'' if is_ended else '(?s:.*)'}"
    return whole.replace("\\/", "/").replace("/", "\\/")


def _standalone(schema: Any, root: Schema) -> Any:
    """A part of a schema, with the definitions that it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema} if isinstance(schema, Mapping) else schema


def _json(schema: Any) -> str:
    part = json_part(dict(schema)) if isinstance(schema, Mapping) else {"json_schema": schema}
    return "%json " + json.dumps(part["json_schema"])
