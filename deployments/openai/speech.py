"""What a model says, taken apart while it streams: thoughts, content and calls.

Pieces of text go in as the rounds give them; the parts that come out do not depend on how the text was
cut. White space beside the markers belongs to the template and is left out. What looks like a call and
is none comes out as content, markers included.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deployments.openai.reasoning import Thinking
from deployments.openai.tools import Call, Calling


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read an answer; by default it is all content."""

    thinking: Thinking | None = None
    calling: Calling | None = None


PLAIN = Reading()


@dataclass(frozen=True, slots=True)
class Said:
    """Parts of an answer."""

    content: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    first_call: int = 0  # index of the first of ``calls`` in the whole answer

    def __bool__(self) -> bool:
        return bool(self.content or self.thoughts or self.calls)

    @staticmethod
    def joined(parts: Iterable["Said"]) -> "Said":
        """Put consecutive parts together."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return Said(
            "".join(part.content for part in parts),
            "".join(part.thoughts for part in parts),
            tuple(call for part in parts for call in part.calls),
            next((part.first_call for part in parts if part.calls), 0),
        )


class Speech:
    """Takes one answer apart."""

    def __init__(self, reading: Reading = PLAIN):
        self._thinking = reading.thinking
        self._calling = reading.calling
        self._rest = ""  # what may still be, or hold, the start of a marker
        self._space = _Space(drops_leading=False)
        self._read = self._first_reader()
        self.num_calls = 0

    def push(self, text: str) -> Said:
        """Take the next text; returns what is certain now."""
        return Said.joined(self.hear(text))

    def finish(self) -> Said:
        """End the answer; returns what was held back."""
        return Said.joined(self.hear_out())

    def hear(self, text: str) -> list[Said]:
        """Take the next text; returns what is certain now in the order in which it was said."""
        return self._take(text, is_end=False)

    def hear_out(self) -> list[Said]:
        """End the answer; returns what was held back in its order."""
        parts = self._take("", is_end=True)
        if self.num_calls or self._read == self._thoughts:
            return parts
        return [*parts, Said(self._space.take())]

    def _first_reader(self) -> "Callable[[bool], Said | None]":
        if self._thinking is None:
            return self._content
        if self._thinking.is_open:
            self._space = _Space(drops_leading=True)
            return self._thoughts
        return self._opening

    def _take(self, text: str, *, is_end: bool) -> list[Said]:
        if self._thinking is None and self._calling is None:
            return [Said(text)]
        self._rest += text
        parts: list[Said] = []
        # A reader gives None when it needs more text, and hands over when it has found its marker.
        while (part := self._read(is_end)) is not None:
            parts.append(part)
        return parts

    def _opening(self, is_end: bool) -> Said | None:
        """Before the first word: a marker here begins thoughts, later it is a word like others."""
        assert self._thinking is not None
        start, text = self._thinking.start, self._rest.lstrip()
        if text.startswith(start):
            self._rest = text[len(start) :]
            self._space = _Space(drops_leading=True)
            self._read = self._thoughts
        elif start.startswith(text) and not is_end:
            return None
        else:
            self._read = self._content
        return Said()

    def _thoughts(self, is_end: bool) -> Said | None:
        assert self._thinking is not None
        text, is_found = self._until(self._thinking.end, is_end)
        thoughts = self._space.add(text)
        if is_found:
            self._space = _Space(drops_leading=True)
            self._read = self._content
        elif not text:
            return None
        return Said(thoughts=thoughts)

    def _content(self, is_end: bool) -> Said | None:
        text, is_found = self._until(self._calling.format.start if self._calling else "", is_end)
        content = self._space.add(text)
        if is_found:
            self._read = self._call
        elif not text:
            return None
        return Said(content)

    def _call(self, is_end: bool) -> Said | None:
        assert self._calling is not None
        format_ = self._calling.format
        text, end, rest = self._rest.partition(format_.end) if format_.end else (self._rest, "", "")
        if not end and not is_end:
            return None
        self._rest, self._read = rest, self._content
        try:
            calls = self._calling.read(text)
        except ValueError:
            return Said(self._space.add(format_.start + text + end))
        self._space.take()
        first = self.num_calls
        if not self._calling.is_parallel:
            calls = calls[: 1 - first]
        self.num_calls += len(calls)
        return Said(calls=tuple(calls), first_call=first)

    def _until(self, marker: str, is_end: bool) -> tuple[str, bool]:
        """Take from the rest what is surely before ``marker``, and the marker itself if it is there."""
        before, found, after = self._rest.partition(marker) if marker else (self._rest, "", "")
        if found:
            self._rest = after
            return before, True
        num_held = 0 if is_end else _overlap(before, marker)
        self._rest = before[len(before) - num_held :]
        return before[: len(before) - num_held], False


class _Space:
    """Holds white space back until something follows it."""

    def __init__(self, *, drops_leading: bool):
        self._drops_leading = drops_leading
        self._held = ""

    def add(self, text: str) -> str:
        text = self._held + text
        if self._drops_leading:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._drops_leading = self._drops_leading and not kept
        return kept

    def take(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that ``marker`` begins with, short of the whole marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
