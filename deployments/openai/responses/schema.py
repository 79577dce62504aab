"""What clients may send to ``/v1/responses``: types and ranges. The chat it becomes is checked further."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from deployments.openai.formats import Strict
from deployments.openai.schema import JsonObjectText, Penalty, Stop, TokenId

_MAX_INT = 2**31 - 1
_MAX_TOP_LOGPROBS = 20


class TextPiece(Strict):
    """A piece of text: a client's, or the answer's of an earlier turn."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPiece(Strict):
    """A refusal of an earlier turn."""

    type: Literal["refusal"]
    refusal: str


def _type_of(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def _piece(value: object) -> str:
    return "<refusal>" if _type_of(value) == "refusal" else "<text>"


Piece = Annotated[
    Annotated[TextPiece, Tag("<text>")] | Annotated[RefusalPiece, Tag("<refusal>")], Discriminator(_piece)
]


def _content(value: object) -> str | None:
    return "<string>" if isinstance(value, str) else "<pieces>" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Piece], Field(fail_fast=True), Tag("<pieces>")],
    Discriminator(
        _content,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class MessageItem(Strict):
    """A message of whoever; ``type`` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Strict):
    """A function that the model called in an earlier turn."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: JsonObjectText


class CallOutputItem(Strict):
    """What that function gave."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content


class ThoughtPiece(Strict):
    """A piece of thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPiece], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtPiece], Field(fail_fast=True)] | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _item(value: object) -> str | None:
    kind = _type_of(value)
    if kind is None and isinstance(value, dict) and "type" not in value:
        return "<message>"
    return f"<{kind}>" if kind in _ITEMS else None


_Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item,
        custom_error_type="item_type",
        custom_error_message=f"Input should be an object of type {', '.join(_ITEMS)}; nothing else is served",
    ),
]


def _input(value: object) -> str | None:
    return "<string>" if isinstance(value, str) else "<items>" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[_Item], Field(min_length=1, fail_fast=True), Tag("<items>")],
    Discriminator(
        _input,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Strict):
    """The function that the model is to call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


def _choice(value: object) -> str | None:
    return "<word>" if isinstance(value, str) else "<tool>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[ChosenFunction, Tag("<tool>")],
    Discriminator(
        _choice,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required' or a function",
    ),
]


class TextFormat(Strict):
    """The form of the answer; what a type needs more is checked where it is enforced."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, Field(min_length=1, max_length=64)]


class TextSettings(Strict):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(Strict):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Strict):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=32, fail_fast=True)] | None = None
    stream: bool | None = None
    store: Annotated[bool, Field(description="without effect: nothing is stored")] | None = None
    metadata: dict[str, str] | None = None
    # What this server adds, as in chat completions.
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, description="1: off")] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Annotated[bool, Field(description="as in chat_template_kwargs")] | None = None

    @property
    def extra(self) -> Mapping[str, object]:
        """Top-level fields that the schema does not declare."""
        return self.model_extra or {}

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are told."""
        return "message.output_text.logprobs" in (self.include or ())
