"""A chat request to prompt ids, through the model's chat template."""

from deployments.generation import Tokenizer
from deployments.openai.schema import ChatRequest


def render(request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the conversation, ready for the assistant's turn; raises ``InvalidRequest``."""
    wants_tools = request.extra.get("tool_choice") != "none"
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if wants_tools else []
    return tokenizer.apply_chat(
        [message.model_dump(exclude_none=True) for message in request.messages],
        tools=tools or None,
        add_generation_prompt=True,
        template_kwargs=request.chat_template_kwargs,
    )
