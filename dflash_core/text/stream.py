"""One row's text on its way to the client: committed ids in, text out, cut at the first stop string."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.text.detokenize import detokenizer_for
from dflash_core.text.stops import StopMatcher
from dflash_core.text.tokenizer import Tokenizer

Piece = tuple[int, str]
"""Text, and which of the row's tokens it came from, counted from 0."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added."""

    text: str
    num_tokens_used: int  # of the pushed ids, up to and including the one that completed a stop string
    stop: str | None = None  # the stop string that ended the text; it is not part of ``text``
    pieces: tuple[Piece, ...] = ()  # ``text`` by its tokens, if the stream traces

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the row is over, later ids have no text."""
        return self.stop is not None


class TextStream:
    """Detokeniser and stop strings of one row; with ``traces``, text is told apart by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
        traces: bool = False,
    ):
        self._detokenizer = detokenizer_for(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(stop_strings)
        self._has_stops = bool(stop_strings)
        self._stop: str | None = None
        self._num_unchecked = min_tokens  # ids still to come whose text can be no part of a stop string
        self._origins = _Origins() if traces else None

    def push(self, ids: Sequence[int], *, is_last_stop: bool = False) -> TextDelta:
        """Take newly committed ids.

        ``is_last_stop`` says that the last id ended the row as a stop token: it counts as used and has
        no text, be it special or not.
        """
        if self._stop is not None:
            return TextDelta("", 0, self._stop)
        readable = ids[:-1] if is_last_stop else ids
        if not self._has_stops and self._origins is None:
            return TextDelta(self._detokenizer.add(readable), len(ids))
        texts: list[str] = []
        num_used = len(ids)
        # One id at a time, or it would not be known which one a text came from, or completed a stop string.
        for number, token_id in enumerate(readable, start=1):
            texts.append(self._add(token_id))
            if self._stop is not None:
                num_used = number
                break
        return self._delta("".join(texts), num_used)

    def finish(self) -> TextDelta:
        """End the row: what was held back comes out, still cut at a stop string."""
        if self._stop is not None:
            return TextDelta("", 0, self._stop)
        text = self._detokenizer.finish()
        if self._origins is not None:
            self._origins.add_to_last(len(text))
        progress = self._matcher.feed(text)
        self._stop = progress.stop
        return self._delta(progress.text + self._matcher.finish(), 0)

    def _add(self, token_id: int) -> str:
        text = self._detokenizer.add([token_id])
        if self._origins is not None:
            self._origins.add(len(text))
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return text
        progress = self._matcher.feed(text)
        self._stop = progress.stop
        return progress.text

    def _delta(self, text: str, num_used: int) -> TextDelta:
        pieces = self._origins.split(text) if self._origins is not None else ()
        return TextDelta(text, num_used, self._stop, pieces)


class _Origins:
    """Which token a character came from. Text leaves in the order in which it came, whatever held it back."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._inside: deque[tuple[int, int]] = deque()  # token, characters that are not out yet

    def add(self, num_characters: int) -> None:
        """The next token, and how much text it added."""
        self._num_tokens += 1
        self.add_to_last(num_characters)

    def add_to_last(self, num_characters: int) -> None:
        """More text of the last token."""
        if num_characters:
            self._inside.append((max(0, self._num_tokens - 1), num_characters))

    def split(self, text: str) -> tuple[Piece, ...]:
        """Take text out, token by token."""
        pieces: list[Piece] = []
        while text:
            number, count = self._inside.popleft()
            pieces.append((number, text[:count]))
            if len(text) < count:
                self._inside.appendleft((number, count - len(text)))
            text = text[count:]
        return tuple(pieces)
