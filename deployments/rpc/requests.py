"""What came over gRPC, as the request that HTTP would have parsed: one schema checks both."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message
from pydantic_core import from_json

from deployments.generation import Generation
from deployments.openai.parse import parse_document
from deployments.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from dflash_core.errors import InvalidRequest

Document = dict[str, Any]

_ROLES: Mapping[int, str] = {
    value: name.removeprefix("ROLE_").lower() for name, value in pb.Role.items() if value
}

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)

# The schema's names of fields to ours; those of sampling are the same.
_PATHS: Mapping[str, str] = {
    "messages": "spec.chat.messages",
    "tools": "spec.chat.tools",
    "chat_template_kwargs": "spec.chat.template_arguments",
    "model": "spec.model",
    "max_tokens": "spec.max_tokens",
    "stop": "spec.stopping.strings",
    "stop_token_ids": "spec.stopping.token_ids",
    "ignore_eos": "spec.stopping.ignore_eos",
    "min_tokens": "spec.stopping.min_tokens",
    "logprobs": "spec.logprobs.top",
    "top_logprobs": "spec.logprobs.top",
    "structured_outputs": "spec.structure",
    **{name: f"spec.sampling.{name}" for name in (*_SAMPLING, "logit_bias")},
}


def parse(spec: pb.GenerationSpec) -> GenerationRequest:
    """Check types and ranges; raises ``InvalidRequest`` that names a field of ``spec``."""
    kind = spec.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest(
            "You must provide one of 'spec.text', 'spec.chat' and 'spec.token_ids'.",
            param="spec.prompt",
            code="missing_required_parameter",
        )
    try:
        document = _document(spec)
        request = parse_document(document, ChatRequest if kind == "chat" else CompletionRequest)
    except InvalidRequest as error:
        raise in_our_words(error, spec) from None
    return request


def continued(generation: Generation, spec: pb.GenerationSpec) -> Generation:
    """The same generation as the rest of an answer that was begun elsewhere; raises ``InvalidRequest``."""
    count = spec.continued
    if not count:
        return generation
    if spec.WhichOneof("prompt") != "token_ids" or count >= len(generation.prompt_ids):
        raise InvalidRequest(
            f"'spec.continued' is {count}: it counts some of 'spec.token_ids.ids', but not all.",
            param="spec.continued",
            code="invalid_value",
        )
    sampling = generation.sampling
    if sampling.min_tokens:
        sampling = replace(sampling, min_tokens=sampling.min_tokens + count)
    return replace(generation, num_continued=count, sampling=sampling)


def in_our_words(error: InvalidRequest, spec: pb.GenerationSpec) -> InvalidRequest:
    """Name the field as the proto does, in the message too."""
    if error.param is None:
        return error
    head = re.match(r"\w*", error.param)
    name = head.group() if head else ""
    prompt = "spec.text" if spec.WhichOneof("prompt") == "text" else "spec.token_ids.ids"
    path = prompt if name == "prompt" else _PATHS.get(name, name)
    ours = (path + error.param[len(name) :]).replace("].function.", "].")
    message = str(error).replace(f"'{error.param}'", f"'{ours}'")
    return type(error)(message, param=ours, code=error.code)


def _document(spec: pb.GenerationSpec) -> Document:
    document: Document = _present(spec, ("max_tokens",)) | {"model": spec.model}
    document |= _present(spec.sampling, _SAMPLING)
    document |= _present(spec.stopping, ("ignore_eos", "min_tokens"))
    if spec.sampling.logit_bias:
        document["logit_bias"] = {str(token): bias for token, bias in spec.sampling.logit_bias.items()}
    if spec.stopping.strings:
        document["stop"] = list(spec.stopping.strings)
    if spec.stopping.token_ids:
        document["stop_token_ids"] = list(spec.stopping.token_ids)
    kind = spec.WhichOneof("prompt")
    if spec.HasField("logprobs"):
        top = spec.logprobs.top
        document |= {"logprobs": True, "top_logprobs": top} if kind == "chat" else {"logprobs": top}
        if spec.logprobs.prompt and kind == "chat":
            raise InvalidRequest(
                "'spec.logprobs.prompt' is not for a conversation: ask for 'spec.text' or 'spec.token_ids'.",
                param="spec.logprobs.prompt",
                code="invalid_value",
            )
        document |= {"echo": True} if spec.logprobs.prompt else {}
    if spec.HasField("structure"):
        document["structured_outputs"] = _structure(spec.structure)
    match kind:
        case "chat":
            document |= _conversation(spec.chat)
        case "token_ids":
            document["prompt"] = list(spec.token_ids.ids)
        case _:
            document["prompt"] = spec.text
    return document


def _structure(structure: pb.Structure) -> Document:
    name = structure.WhichOneof("kind")
    if name is None:
        raise InvalidRequest(
            "Invalid 'structured_outputs': give one of 'json', 'regex', 'choice' and 'grammar'.",
            param="structured_outputs",
            code="missing_required_parameter",
        )
    return {name: list(structure.choice.texts) if name == "choice" else getattr(structure, name)}


def _conversation(chat: pb.Conversation) -> Document:
    document: Document = {"messages": [_message(message) for message in chat.messages]}
    if chat.tools:
        document["tools"] = [
            {"type": "function", "function": _function(tool, f"tools[{index}]")}
            for index, tool in enumerate(chat.tools)
        ]
    if chat.HasField("template_arguments"):
        path = "chat_template_kwargs"
        document[path] = _json_object(chat.template_arguments, path)
    return document


def _message(message: pb.Message) -> Document:
    plain = _present(message, ("content", "name", "reasoning_content", "tool_call_id"))
    if message.role:
        plain["role"] = _ROLES.get(message.role, str(message.role))
    if message.tool_calls:
        plain["tool_calls"] = [
            _present(call, ("id",)) | {"function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return plain


def _function(tool: pb.Function, path: str) -> Document:
    plain = {"name": tool.name} | _present(tool, ("description",))
    if tool.HasField("parameters"):
        plain["parameters"] = _json_object(tool.parameters, f"{path}.parameters")
    return plain


def _present(message: Message, names: Iterable[str]) -> Document:
    """The optional fields that were sent."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _json_object(text: str, path: str) -> Document:
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"Invalid '{path}': it should be a JSON object as text.", param=path, code="invalid_value"
        )
    return value
