"""Parts of an answer in OpenAI's wire form."""

from typing import Any

from deployments.openai.speech import Said
from deployments.openai.tools import Call

Json = dict[str, Any]


def delta_json(said: Said) -> Json:
    """Return what a chunk adds to the message; each call comes in one piece."""
    delta: Json = {"reasoning_content": said.thoughts} if said.thoughts else {}
    if said.calls:
        calls = enumerate(said.calls, start=said.first_call)
        delta["tool_calls"] = [{"index": index, **_call_json(call)} for index, call in calls]
    if said.content or not delta:
        delta["content"] = said.content
    return delta


def message_json(said: Said) -> Json:
    """Return the whole message; without content of its own beside thoughts or calls it has null."""
    has_other = bool(said.thoughts or said.calls)
    message: Json = {"role": "assistant", "content": said.content or (None if has_other else "")}
    message["refusal"] = None
    if said.thoughts:
        message["reasoning_content"] = said.thoughts
    if said.calls:
        message["tool_calls"] = [_call_json(call) for call in said.calls]
    return message


def _call_json(call: Call) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
