"""Stop strings, found while text streams.

The answer depends on the text alone, not on how it was cut into pieces: the stop that is *complete*
first wins, the longest one if several end on the same character.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopProgress:
    """Text that no stop string can touch any more, and the stop string found, if one was."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Fed with pieces of text, returns what surely stands before any stop string.

    One Knuth-Morris-Pratt automaton per stop string: linear in the text, whatever the strings are.
    """

    def __init__(self, stop_strings: Sequence[str]):
        if not all(stop_strings):
            raise ValueError("an empty stop string would stop at once")
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self._held = ""  # the longest suffix so far that could begin a stop string

    def feed(self, piece: str) -> StopProgress:
        """Take the next text. After a stop string was found nothing more may be fed."""
        text = self._held + piece
        found = self._first_complete(piece)
        if found is not None:
            end, stop = found
            self._held = ""
            return StopProgress(text[: len(text) - len(piece) + end - len(stop)], stop)
        num_held = max((automaton.matched for automaton in self._automata), default=0)
        self._held = text[len(text) - num_held :]
        return StopProgress(text[: len(text) - num_held])

    def finish(self) -> str:
        """Return what was held back: the text ended before a stop string did."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, piece: str) -> tuple[int, str] | None:
        """Where in ``piece`` the first stop string ends, and which."""
        best: tuple[int, str] | None = None
        for automaton in self._automata:
            end = automaton.advance(piece)
            if end is not None:
                candidate = (end, automaton.pattern)
                if best is None or (end, -len(candidate[1])) < (best[0], -len(best[1])):
                    best = candidate
        return best


class _Automaton:
    """How much of one pattern the text so far ends with."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.matched = 0  # characters of the pattern
        self._fallback = _fallbacks(pattern)

    def advance(self, piece: str) -> int | None:
        """Read the piece; returns the index just after the pattern's first end in it, else None."""
        pattern, fallback, matched = self.pattern, self._fallback, self.matched
        for i, character in enumerate(piece):
            while matched and pattern[matched] != character:
                matched = fallback[matched]
            if pattern[matched] == character:
                matched += 1
                if matched == len(pattern):
                    return i + 1
        self.matched = matched
        return None


def _fallbacks(pattern: str) -> list[int]:
    """For each number of matched characters, the longest shorter match that is also a suffix of it."""
    fallback = [0, 0]
    matched = 0
    for character in pattern[1:]:
        while matched and pattern[matched] != character:
            matched = fallback[matched]
        matched += pattern[matched] == character
        fallback.append(matched)
    return fallback
