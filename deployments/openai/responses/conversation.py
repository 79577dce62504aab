"""A request for a response to the chat that it is; mistakes keep the names that its client used."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deployments.openai.fields import ignored_fields, refuse
from deployments.openai.parse import parse_document
from deployments.openai.responses.schema import (
    CallItem,
    CallOutputItem,
    Content,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    TextPiece,
)
from deployments.openai.schema import ChatRequest
from dflash_core.errors import InvalidRequest

Json = dict[str, Any]

# Fields of the same name and meaning in both.
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "chat_template_kwargs",
    "enable_thinking",
)

# Would need a memory, another deployment or other media. The values are those that ask for nothing.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), "this server stores no responses; send the earlier turns in 'input'"),
    "conversation": ((), "this server stores no conversations; send the earlier turns in 'input'"),
    "prompt": ((), "this server stores no prompts; send the text in 'input'"),
    "background": ((False,), "this server answers while the client waits"),
    "truncation": (("disabled",), "this server never drops parts of the input"),
    "context_management": (([],), "this server never drops parts of the input"),
}

# Nothing here would change the answer.
_SILENT = frozenset({"stream_options", "max_tool_calls", "prompt_cache_options", "access_programs"})
_INCLUDES_NOTHING = frozenset({"reasoning.encrypted_content", "message.output_text.logprobs"})

# Other servers' fields for grammars, as a chat takes them.
_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

# A chat's names for what a mistake is about, and this dialect's; the longer ones first.
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


def as_chat(request: ResponsesRequest) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the chat, and the names of fields that have no effect; raises ``InvalidRequest``."""
    extra = dict(request.extra)
    for name, (neutral, reason) in _REFUSED.items():
        refuse(name, extra.pop(name, None), neutral, reason)
    grammars = {name: extra.pop(name) for name in _GRAMMARS if name in extra}
    unknown = {name: value for name, value in extra.items() if name not in _SILENT}
    ignored = [*ignored_fields(unknown), *_without_effect(request)]
    document: Json = {name: getattr(request, name) for name in _SHARED}
    document |= grammars
    document["messages"] = messages(request)
    document["max_completion_tokens"] = request.max_output_tokens
    document["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in request.tools or ()] or None
    document["tool_choice"] = _tool_choice(request)
    document |= _logprobs(request) | _thinking(request) | _format(request)
    with in_words_of_responses():
        chat = parse_document(document, ChatRequest)
        ignored += ignored_fields(chat.extra)
    return chat, tuple(ignored)


@contextmanager
def in_words_of_responses() -> Iterator[None]:
    """Let mistakes in the chat name the fields of the request that it was made from."""
    try:
        yield
    except InvalidRequest as error:
        message = re.sub(r"'([a-z_]+[a-z_.0-9\[\]]*)'", lambda name: f"'{_renamed(name[1])}'", str(error))
        param = _renamed(error.param) if error.param else None
        raise type(error)(message, param=param, code=error.code) from None


def _renamed(path: str) -> str:
    for theirs, ours in _NAMES.items():
        if path == theirs or path.startswith((f"{theirs}.", f"{theirs}[")):
            return ours + path[len(theirs) :]
    return path


def messages(request: ResponsesRequest) -> list[Json]:
    """Return the messages of the chat. What an assistant thought, said and called in a row is one of them."""
    if isinstance(request.input, str):
        told: list[Json] = [{"role": "user", "content": request.input}]
    else:
        told = []
        for item in request.input:
            _tell(item, told)
    if not request.instructions:
        return told
    # Templates take one system message, at the head.
    if told and told[0]["role"] in ("system", "developer"):
        first = told.pop(0)
        return [first | {"content": f"{request.instructions}\n\n{first['content']}"}, *told]
    return [{"role": "system", "content": request.instructions}, *told]


def _tell(item: Item, told: list[Json]) -> None:
    match item:
        case ReasoningItem():
            pieces = item.content or item.summary or []
            turn = _turn(told, closes=("content", "tool_calls"))
            thoughts = "".join(piece.text for piece in pieces)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
        case MessageItem(role="assistant"):
            _turn(told, closes=("content", "tool_calls"))["content"] = _text(item.content)
        case MessageItem():
            told.append({"role": item.role, "content": _text(item.content)})
        case CallItem():
            call = {"name": item.name, "arguments": item.arguments}
            calls = _turn(told, closes=()).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
        case CallOutputItem():
            told.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _turn(told: list[Json], closes: tuple[str, ...]) -> Json:
    """The assistant's message that is growing, or a new one where it has what ``closes`` it."""
    if not told or told[-1]["role"] != "assistant" or any(name in told[-1] for name in closes):
        told.append({"role": "assistant"})
    return told[-1]


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(piece.text if isinstance(piece, TextPiece) else piece.refusal for piece in content)


def _tool(tool: Json) -> Json:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _tool_choice(request: ResponsesRequest) -> object:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _logprobs(request: ResponsesRequest) -> Json:
    if not request.wants_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": request.top_logprobs}


def _thinking(request: ResponsesRequest) -> Json:
    """An effort is a switch here: templates know thinking or none."""
    if request.enable_thinking is not None or request.reasoning is None or request.reasoning.effort is None:
        return {}
    return {"enable_thinking": request.reasoning.effort != "none"}


def _format(request: ResponsesRequest) -> Json:
    """The form of the answer as a chat has it, which alone decides what can be kept."""
    format_ = request.text.format if request.text is not None else None
    if format_ is None or format_.type == "text":
        return {}
    return {"response_format": response_format(format_)}


def response_format(format_: TextFormat) -> Json:
    """``text.format`` in the words of ``response_format``: a schema stands one level deeper there."""
    more = dict(format_.model_extra or {})
    if format_.type != "json_schema":
        return {"type": format_.type, **more}
    return {"type": "json_schema", "json_schema": more}


def _without_effect(request: ResponsesRequest) -> list[str]:
    ignored = ["store"] if request.store else []  # said, since a client might come back for it
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    if request.reasoning is not None and (request.reasoning.summary or request.reasoning.generate_summary):
        ignored.append("reasoning.summary")
    asked = [name for name in request.include or () if name not in _INCLUDES_NOTHING]
    return ignored + (["include"] if asked else [])
