"""Saved prefixes of chats: which there are, which of them a prompt begins with, and which go first.

Holds no opinion on what a state is; that is ``prefixes``. One store serves all windows of a target, on its
MLX thread.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a state. Another target, drafter or dtype can make no use of it."""

    target: str  # fingerprint
    drafter: str  # fingerprint; empty without a drafter
    dtype: str


@dataclass(frozen=True, slots=True)
class _Entry(Generic[S]):
    state: S
    num_bytes: int


class PrefixStore(Generic[S]):
    """States by their tokens, at most ``limit`` bytes; the least recently used one goes first.

    Each state is counted whole, also where it shares memory with a longer or a shorter one.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._entries: OrderedDict[tuple[Origin, bytes], _Entry[S]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, origin: Origin, tokens: Sequence[int]) -> bool:
        """Whether a state of exactly these tokens is here; looking makes no use of it."""
        return (origin, _key(tokens)) in self._entries

    def save(self, origin: Origin, tokens: Sequence[int], state: S, num_bytes: int) -> None:
        """Keep the state after ``tokens``. One that exceeds the limit by itself is not kept."""
        key = (origin, _key(tokens))
        old = self._entries.pop(key, None)
        if old is not None:
            self._num_bytes -= old.num_bytes
        if num_bytes > self.limit:
            return
        self._entries[key] = _Entry(state, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self.limit:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def find(self, origin: Origin, tokens: Sequence[int]) -> S | None:
        """The state of the longest saved prefix of ``tokens`` that leaves at least one of them to read."""
        wanted = _key(tokens)
        fitting = [
            key
            for key in self._entries
            if len(key[1]) < len(wanted) and key[0] == origin and wanted.startswith(key[1])
        ]
        if not fitting:
            return None
        longest = max(fitting, key=lambda key: len(key[1]))
        self._entries.move_to_end(longest)
        return self._entries[longest].state


def _key(tokens: Sequence[int]) -> bytes:
    """Four bytes a token, so that a prefix of tokens is a prefix of bytes, which compare fast."""
    return array("i", tokens).tobytes()
