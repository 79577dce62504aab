"""How wide the next block is: anchor + drafts."""

from typing import Protocol

from dflash_core.events import RoundReport


class WidthPolicy(Protocol):
    """Chooses a width per round and learns from what came of it."""

    def choose(self, num_live: int, num_slots: int) -> int:
        """Width of the next round for ``num_live`` rows in ``num_slots`` slots; 1 is classic."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Learn from a finished round."""
        ...


class FixedWidth:
    """The same width every round."""

    def __init__(self, width: int):
        self._width = width

    def choose(self, num_live: int, num_slots: int) -> int:
        """The fixed width."""
        return self._width

    def observe(self, report: RoundReport) -> None:
        """Nothing to learn."""
