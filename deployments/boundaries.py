"""Where the messages of a rendered prompt begin, and at which of these places it is worth saving.

A chat template begins every message, the assistant's turn too, with one control token. A client's text
cannot contain it, so its places are the message boundaries, whoever rendered the prompt.
"""

from collections.abc import Sequence

from deployments.generation import Tokenizer
from dflash_core.errors import InvalidRequest

MOST_LAST = 2  # places before the prompt's end; each holds a whole state, tens of MiB for a real model


def find_opener(tokenizer: Tokenizer) -> int | None:
    """The control token with which the template begins the assistant's turn; None if there is no such one."""
    chat = [{"role": "user", "content": "Hello"}]
    try:
        bare = tokenizer.apply_chat(chat, add_generation_prompt=False)
        ready = tokenizer.apply_chat(chat, add_generation_prompt=True)
    except InvalidRequest:  # no template, or one that wants more than this
        return None
    if len(ready) <= len(bare) or ready[: len(bare)] != bare:
        return None
    opener = ready[len(bare)]
    return opener if opener in tokenizer.special_ids else None


def places_to_save(prompt_ids: Sequence[int], opener: int | None) -> tuple[int, ...]:
    """Lengths of the prompt that end with a whole message.

    The end of the first message, which other chats may share (a system prompt, tools), and the last ones:
    before the generation prompt, where the next turn goes on even if the template rewrites this one, and
    before the last message, which a client may say anew.
    """
    starts = [place for place, token in enumerate(prompt_ids) if token == opener and place > 0]
    return tuple(dict.fromkeys((*starts[:1], *starts[-MOST_LAST:])))
