"""A chat request to prompt ids, through the model's chat template."""

from collections.abc import Mapping

from deployments.generation import Tokenizer
from deployments.openai.schema import ChatRequest


def render(request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the conversation, ready for the assistant's turn; raises ``InvalidRequest``."""
    wants_tools = request.tool_choice != "none"
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if wants_tools else []
    return tokenizer.apply_chat(
        [message.model_dump(exclude_none=True) for message in request.messages],
        tools=tools or None,
        add_generation_prompt=True,
        template_kwargs=_template_kwargs(request),
    )


def _template_kwargs(request: ChatRequest) -> Mapping[str, object] | None:
    """The shorthand of some clients is a template's variable; the client's own word for it wins."""
    if request.enable_thinking is None:
        return request.chat_template_kwargs
    return {"enable_thinking": request.enable_thinking, **(request.chat_template_kwargs or {})}
