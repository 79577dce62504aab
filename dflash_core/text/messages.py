"""Chat messages as they came from JSON, parsed into what chat templates read.

Templates differ in what they tolerate; what comes out of here has one form. ``content`` is a string (or
absent), a tool call's ``arguments`` is an object, ``developer`` is ``system``, keys without a value are
left out, and unknown keys do not reach the template.
"""

import json
from typing import Any, NoReturn, TypeGuard

from dflash_core.errors import InvalidRequest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(messages: object) -> list[Message]:
    """Return the messages in the one form; raises ``InvalidRequest`` naming the place otherwise."""
    if not _is_array(messages) or not messages:
        _refuse("messages", "expected a non-empty list of messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def parse_tools(tools: object) -> list[Message] | None:
    """Return the tool definitions as templates read them, or None where there are none."""
    if tools is None:
        return None
    if not _is_array(tools) or not all(_is_object(tool) for tool in tools):
        raise InvalidRequest("tools: expected a list of objects", param="tools")
    return tools or None


def _parse_message(message: object, where: str) -> Message:
    if not _is_object(message):
        _refuse(where, "expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        _refuse(f"{where}.role", f"expected one of {', '.join(ROLES)}")
    role = "system" if role == "developer" else role
    parsed: Message = {"role": role}

    content = _parse_content(message.get("content"), f"{where}.content")
    if content is not None:
        parsed["content"] = content
    elif role != "assistant":
        _refuse(f"{where}.content", "expected a string or a list of text parts")

    # Two names for the same thing are in use; templates read the first.
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    for key, value in (
        ("name", message.get("name")),
        ("tool_call_id", message.get("tool_call_id")),
        ("reasoning_content", reasoning),
    ):
        if value is not None and not isinstance(value, str):
            _refuse(f"{where}.{key}", "expected a string")
        if value is not None:
            parsed[key] = value

    tool_calls = message.get("tool_calls")
    if tool_calls:
        if role != "assistant" or not _is_array(tool_calls):
            _refuse(f"{where}.tool_calls", "expected a list, in an assistant message")
        parsed["tool_calls"] = [
            _parse_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(tool_calls)
        ]
    return parsed


def _parse_content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not _is_array(content):
        _refuse(where, "expected a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if _is_object(part) else None
        if kind != "text":
            _refuse(f"{where}[{i}]", "only parts of type text are supported; this model reads text only")
        text = part.get("text")
        if not isinstance(text, str):
            _refuse(f"{where}[{i}].text", "expected a string")
        texts.append(text)
    return "".join(texts)


def _parse_tool_call(call: object, where: str) -> Message:
    if not _is_object(call) or call.get("type", "function") != "function":
        _refuse(where, "expected an object of type function")
    function = call.get("function")
    if not _is_object(function) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function", "expected an object with a name and arguments")
    arguments = _parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    parsed: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        parsed["id"] = call["id"]
    return parsed


def _parse_arguments(arguments: object, where: str) -> Message:
    # OpenAI sends JSON in a string, templates iterate over an object.
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            _refuse(where, "expected a string that holds a JSON object")
    arguments = arguments or {}
    if not _is_object(arguments):
        _refuse(where, "expected a JSON object")
    return arguments


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_array(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _refuse(where: str, expected: str) -> NoReturn:
    raise InvalidRequest(f"{where}: {expected}", param="messages")
