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


def thinking_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Thinking | None:
    """Return the markers of the model, None for one that has none."""
    markers = tokenizer.text_markers
    for start, end in _KNOWN:
        if start in markers and end in markers:
            return Thinking(start, end, _is_open(prompt_ids, tokenizer, start, end))
    return None


def _is_open(prompt_ids: Sequence[int], tokenizer: Tokenizer, start: str, end: str) -> bool:
    """Tell whether the generation prompt has begun thoughts.

    It is what follows the last control token; what a system prompt says of ``<think>`` stands before.
    """
    own: list[int] = []
    for token_id in reversed(prompt_ids):
        if token_id in tokenizer.special_ids:
            break
        own.append(token_id)
    text = tokenizer.decode(own[::-1])
    return text.rfind(start) > text.rfind(end)
