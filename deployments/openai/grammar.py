"""The grammar of an answer: what must be said, behind the thoughts that a template has a model begin with."""

import json
from collections.abc import Sequence

from deployments.generation import Tokenizer
from deployments.openai.forcing import call_rules, can_write, is_forced, marker
from deployments.openai.reasoning import thinking_of
from deployments.openai.schema import ChatRequest, GenerationRequest
from deployments.openai.structure import Structure, structure_of
from deployments.openai.tools import check_choice

_TEXT = "TEXT: /(?s:.*)/"


def grammar_of(
    request: GenerationRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[str, str] | None:
    """Return a grammar for llguidance and the field that asks for it; None for a free answer.

    A forced call is all there is to the answer: no content is left of which a format could be asked.
    Raises ``InvalidRequest``.
    """
    structure = structure_of(request)
    if not isinstance(request, ChatRequest):
        return None if structure is None else (_bundle(structure), structure.param)
    check_choice(request)
    if is_forced(request):
        thoughts, calls = _thoughts(prompt_ids, tokenizer), call_rules(request, tokenizer)
        start = "start: thoughts calls" if thoughts else "start: calls"
        return "\n".join([start, *thoughts, *calls]), "tools"
    if structure is None:
        return None
    calls = call_rules(request, tokenizer) if can_write(request, tokenizer) else []
    return _bundle(structure, _thoughts(prompt_ids, tokenizer), calls), structure.param


def _bundle(structure: Structure, thoughts: Sequence[str] = (), calls: Sequence[str] = ()) -> str:
    """A structured answer, behind thoughts; where the model may call instead, that or calls."""
    if not thoughts and not calls:
        return json.dumps({"grammars": structure.grammars})
    start = f"start: {'thoughts ' if thoughts else ''}{'(calls | @answer)' if calls else '@answer'}"
    main = "\n".join([start, *thoughts, *calls])
    answer, *others = structure.grammars
    return json.dumps({"grammars": [{"lark_grammar": main}, {**answer, "name": "answer"}, *others]})


def _thoughts(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Rules for the thoughts before an answer: what the prompt has begun, or what the template knows of."""
    thinking = thinking_of(prompt_ids, tokenizer)
    if thinking is None or thinking.is_over:
        return []
    start, end = marker(thinking.start, tokenizer), marker(thinking.end, tokenizer)
    if thinking.is_open:
        return [f"thoughts: TEXT {end} SPACE", _TEXT, _SPACE]
    if thinking.start in tokenizer.chat_template:
        return [f"thoughts: ({start} TEXT {end} SPACE)?", _TEXT, _SPACE]
    return []


_SPACE = r"SPACE: /[ \n]{0,4}/"
