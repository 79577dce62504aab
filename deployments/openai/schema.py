"""What clients may send. Types and ranges only; what needs the model is checked in ``prepare``.

Strict: ``true`` is no number, ``"1"`` is no number, NaN is refused. Long lists fail at their first
mistake. Fields that are not declared here land in ``extra``, where ``fields`` tells the silent, the
unsupported and the unknown apart. Tags in angle brackets name a branch of a union; error paths leave
them out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError, from_json

from deployments.openai.formats import (
    Choices,
    Pattern,
    ResponseFormat,
    SchemaOrText,
    Strict,
    StructuredOutputs,
)

_MAX_INT = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_MAX_TOP_LOGPROBS = 20


def _none_of_false(value: object) -> object:
    """Some clients say false where they want none."""
    return None if value is False else value


_TopLogprobs = Annotated[int, Field(ge=0, le=_MAX_TOP_LOGPROBS)]


def _only_text(value: object, check: ValidatorFunctionWrapHandler) -> object:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("text_only", "this model reads text; Input should be 'text'") from None


class TextPart(Strict):
    """A piece of a message's content. Only text is understood."""

    type: Annotated[Literal["text"], WrapValidator(_only_text)]
    text: str


def _json_object(text: str) -> str:
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("json_object", "Input should be a JSON object as text")
    return text


JsonObjectText = Annotated[str, AfterValidator(_json_object), Field(description="a JSON object as text")]


class CalledFunction(Strict):
    """The function that an assistant called."""

    name: str
    arguments: JsonObjectText


class ToolCall(Strict):
    """One tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionSpec(Strict):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(Strict):
    """A tool offered to the model."""

    type: Literal["function"]
    function: FunctionSpec


def _is_text(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(
        _is_text,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _only_assistants_may_be_silent(cls, content: object, info: ValidationInfo) -> object:
        # A wrong role is not in the data: its own error is the one to report.
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "Field required")
        return content


class StreamOptions(Strict):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OwnOptions(Strict):
    """What no other server has."""

    model_config = ConfigDict(extra="forbid")

    rounds: Annotated[bool, Field(description="tell what each round drafted, walked and accepted")] | None = (
        None
    )


def _is_one_stop(value: object) -> str | None:
    return "<one>" if isinstance(value, str) else "<many>" if isinstance(value, list) else None


_StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    Annotated[_StopString, Tag("<one>")] | Annotated[list[_StopString], Tag("<many>"), Field(max_length=16)],
    Discriminator(
        _is_one_stop,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of up to 16 strings",
    ),
]


class GenerationRequest(Strict):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, description="1: off")] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024, description="token id to what is added to its logit"),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    dflash: OwnOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    @property
    def extra(self) -> Mapping[str, object]:
        """Top-level fields that the schema does not declare."""
        return self.model_extra or {}


class ChosenFunction(Strict):
    """The function that the model is to call."""

    name: Annotated[str, Field(min_length=1)]


class ChosenTool(Strict):
    """A tool that the model is to call."""

    type: Literal["function"]
    function: ChosenFunction


def _choice_kind(value: object) -> str | None:
    return "<word>" if isinstance(value, str) else "<tool>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[ChosenTool, Tag("<tool>")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required' or a function",
    ),
]


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: (
        Annotated[int, Field(ge=1, le=_MAX_INT, description="wins over max_tokens")] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    tools: Annotated[list[ToolSpec], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: Annotated[bool, Field(description="as in chat_template_kwargs")] | None = None


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    return "<many>" if value and isinstance(value[0], str | list) else "<ids>"


_PROMPT_ERROR = "Input should be a string or a list of token ids"
_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_OnePrompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_TokenIds, Tag("<ids>")],
    Discriminator(_prompt_kind, custom_error_type="prompt_type", custom_error_message=_PROMPT_ERROR),
]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[_TokenIds, Tag("<ids>")]
    | Annotated[list[_OnePrompt], Field(fail_fast=True), Tag("<many>")],
    Discriminator(_prompt_kind, custom_error_type="prompt_type", custom_error_message=_PROMPT_ERROR),
]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT, description="0 only with echo")] | None = None
    echo: bool | None = None
    logprobs: Annotated[_TopLogprobs | None, BeforeValidator(_none_of_false)] = None
