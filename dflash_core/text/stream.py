"""One row's text on its way to the client: committed ids in, text out, cut at the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.text.detokenize import detokenizer_for
from dflash_core.text.stops import StopMatcher
from dflash_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added."""

    text: str
    num_tokens_used: int  # of the pushed ids, up to and including the one that completed a stop string
    stop: str | None = None  # the stop string that ended the text; it is not part of ``text``

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the row is over, later ids have no text."""
        return self.stop is not None


class TextStream:
    """Detokeniser and stop strings of one row."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer_for(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(stop_strings)
        self._has_stops = bool(stop_strings)
        self._stop: str | None = None
        self._num_unchecked = min_tokens  # ids still to come whose text can be no part of a stop string

    def push(self, ids: Sequence[int], *, is_last_stop: bool = False) -> TextDelta:
        """Take newly committed ids.

        ``is_last_stop`` says that the last id ended the row as a stop token: it counts as used and has
        no text, be it special or not.
        """
        if self._stop is not None:
            return TextDelta("", 0, self._stop)
        readable = ids[:-1] if is_last_stop else ids
        if not self._has_stops:
            return TextDelta(self._detokenizer.add(readable), len(ids))
        texts: list[str] = []
        # One id at a time, or the id that completed a stop string would not be known.
        for num_used, token_id in enumerate(readable, start=1):
            text = self._detokenizer.add([token_id])
            if self._num_unchecked > 0:
                self._num_unchecked -= 1
                texts.append(text)
                continue
            progress = self._matcher.feed(text)
            texts.append(progress.text)
            if progress.stop is not None:
                self._stop = progress.stop
                return TextDelta("".join(texts), num_used, self._stop)
        return TextDelta("".join(texts), len(ids))

    def finish(self) -> TextDelta:
        """End the row: what was held back comes out, still cut at a stop string."""
        if self._stop is not None:
            return TextDelta("", 0, self._stop)
        progress = self._matcher.feed(self._detokenizer.finish())
        self._stop = progress.stop
        return TextDelta(progress.text + self._matcher.finish(), 0, self._stop)
