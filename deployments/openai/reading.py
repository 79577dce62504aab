"""How the answer to a request is to be read."""

from collections.abc import Sequence

from deployments.generation import Tokenizer
from deployments.openai.reasoning import thinking_of
from deployments.openai.schema import ChatRequest, GenerationRequest
from deployments.openai.speech import PLAIN, Reading
from deployments.openai.tools import calling_of


def reading_of(request: GenerationRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Reading:
    """Return what to look for in the answer; raises ``InvalidRequest``. Plain completions are text."""
    if not isinstance(request, ChatRequest):
        return PLAIN
    return Reading(thinking_of(prompt_ids, tokenizer), calling_of(request, tokenizer))
