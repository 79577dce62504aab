"""Keeps look-alikes of control tokens in a client's text apart from the template's own.

A user may write ``<|im_end|>``; encoded naively it would end the turn and let the user speak as the
system. So every look-alike in content gets a *mark* after its first character before the template is
rendered, and marks are taken out again only after the rendered text has been split at control tokens.
The mark is one private-use character that occurs nowhere in the input: it cannot be forged, and it
leaves what templates do with content (strip, split, compare) as it was.

Tokens are *markers* here: all the tokens that a checkpoint matches in raw text before anything else.
Some are special (``<|im_end|>``), some are ordinary words of the protocol (``<think>``,
``<tool_response>``).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from dflash_core.errors import InvalidRequest
from dflash_core.text.messages import Message

_PRIVATE_USE = range(0xE000, 0x110000)  # starts with the private-use area, which is all one ever needs

_T = TypeVar("_T")


class Shield:
    """Finds look-alikes of ``markers`` in content and splits rendered text at the real ones."""

    def __init__(self, markers: Iterable[str], special: Iterable[str]):
        markers = sorted(markers, key=len, reverse=True)  # the longest wins, as in the tokenizer
        self._any = _alternatives(markers)
        self._special = _alternatives(sorted(special, key=len, reverse=True))
        # A look-alike may also come about where content meets the template or other content.
        self._heads = tuple({marker[:i] for marker in markers for i in range(1, len(marker))})
        self._tails = tuple({marker[i:] for marker in markers for i in range(1, len(marker))})

    def mark_messages(self, messages: Sequence[Message], mark: str) -> list[Message]:
        """Mark look-alikes in every string of the messages, roles aside.

        What a system prompt or an assistant says may hold the protocol's ordinary words (an echoed
        ``<think>``, an example of ``<tool_call>``); users, tools and call arguments may not.
        """
        return [self._mark_message(message, mark) for message in messages]

    def mark(self, value: _T, mark: str) -> _T:
        """Mark look-alikes of every marker in all strings of a JSON value, keys included."""
        return cast(_T, self._mark(value, self._any, mark))

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield (ordinary text, the marker that follows it); the last piece has no marker."""
        pieces = self._any.split(text)
        yield from zip(pieces[::2], [*pieces[1::2], None], strict=True)

    def _mark_message(self, message: Message, mark: str) -> Message:
        is_trusted = message["role"] in ("system", "assistant")
        marked: Message = {"role": message["role"]}
        for key, value in message.items():
            if key != "role":
                may_use_words = is_trusted and key in ("content", "reasoning_content")
                marked[key] = self._mark(value, self._special if may_use_words else self._any, mark)
        return marked

    def _mark(self, value: object, pattern: re.Pattern[str], mark: str) -> object:
        if isinstance(value, str):
            return self._mark_text(value, pattern, mark)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self._mark_text(k, pattern, mark): self._mark(v, pattern, mark) for k, v in items}
        if isinstance(value, list):
            return [self._mark(item, pattern, mark) for item in cast(list[Any], value)]
        return value

    def _mark_text(self, text: str, pattern: re.Pattern[str], mark: str) -> str:
        marked = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        if text.endswith(self._heads):
            marked += mark
        return mark + marked if text.startswith(self._tails) else marked


def unused_character(*values: object) -> str:
    """Return a private-use character that is in none of the strings of these JSON values.

    Raises ``InvalidRequest`` if they have them all, which takes four megabytes.
    """
    used: set[str] = set()
    for text in _strings(values):
        used.update(text)
    found = next((c for c in map(chr, _PRIVATE_USE) if c not in used), None)
    if found is None:
        raise InvalidRequest("messages: no character is left that these do not use", param="messages")
    return found


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[str, Any], value).items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from _strings(item)


def _alternatives(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, texts)) + ")" if texts else "((?!))")
