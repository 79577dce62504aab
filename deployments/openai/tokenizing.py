"""``/tokenize`` and ``/detokenize`` in vLLM's shapes: what a prompt would be, without playing it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.generation import Backend, Tokenizer
from deployments.openai.prepare import require_model
from deployments.openai.schema import Message, TokenId, ToolSpec
from dflash_core.errors import InvalidRequest

Json = dict[str, Any]


class _Closed(BaseModel):
    # There is no header here to name what was ignored.
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", frozen=True)


class TokenizeRequest(_Closed):
    """Body of ``POST /tokenize``: a plain prompt, or a conversation as the chat endpoint takes it."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[ToolSpec], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = Field(
        None, description="without effect: nothing is added to a prompt here"
    )
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt_or_messages", "send one of 'prompt' and 'messages'")
        return self


class DetokenizeRequest(_Closed):
    """Body of ``POST /detokenize``."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenize(request: TokenizeRequest, backend: Backend) -> Json:
    """Return the ids as the generating endpoints would play them; raises ``InvalidRequest``."""
    _require_model(request.model, backend)
    tokenizer = backend.tokenizer
    ids = _ids(request, tokenizer)
    return {
        "count": len(ids),
        "max_model_len": backend.model_card.max_context,
        "tokens": ids,
        "token_strs": [tokenizer.token(i) for i in ids] if request.return_token_strs else None,
    }


def _ids(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if request.messages is None:
        return tokenizer.encode(request.prompt or "")
    return tokenizer.apply_chat(
        [message.model_dump(exclude_none=True) for message in request.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
        add_generation_prompt=request.add_generation_prompt,
        template_kwargs=request.chat_template_kwargs,
    )


def detokenize(request: DetokenizeRequest, backend: Backend) -> Json:
    """Return the text of the ids, control tokens included; raises ``InvalidRequest``."""
    _require_model(request.model, backend)
    tokenizer = backend.tokenizer
    for index, token in enumerate(request.tokens):
        if token >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"'tokens[{index}]' is {token}, beyond the vocabulary of {tokenizer.vocab_size} tokens.",
                param=f"tokens[{index}]",
                code="invalid_value",
            )
    return {"prompt": tokenizer.decode(request.tokens, skip_special=False)}


def _require_model(name: str | None, backend: Backend) -> None:
    if name is not None:
        require_model(name, backend.model_card)
