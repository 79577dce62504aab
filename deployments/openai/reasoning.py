"""Reasoning: which markers stand around a model's thoughts, and whether a prompt ends inside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.generation import Tokenizer

_KNOWN = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"))


@dataclass(frozen=True, slots=True)
class Thinking:
    """How to tell thoughts from the answer."""

    start: str
    end: str
    is_open: bool  # the prompt itself has begun the thoughts
    is_over: bool = False  # it has ended them too


def thinking_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Thinking | None:
    """Return the markers of the model, None for one that has none."""
    markers = tokenizer.text_markers
    for start, end in _KNOWN:
        if start in markers and end in markers:
            text = _generation_prompt(prompt_ids, tokenizer)
            is_open = text.rfind(start) > text.rfind(end)
            return Thinking(start, end, is_open, is_over=end in text and not is_open)
    return None


def _generation_prompt(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return what the template begins the answer with.

    It is what follows the last control token; what a system prompt says of ``<think>`` stands before.
    """
    own: list[int] = []
    for token_id in reversed(prompt_ids):
        if token_id in tokenizer.special_ids:
            break
        own.append(token_id)
    return tokenizer.decode(own[::-1])
