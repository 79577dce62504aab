"""Which (slots, width) pairs rounds may use. Chosen when a window forms; the loop has no branch on it."""

from collections.abc import Iterable
from typing import Protocol

from dflash_core.row_cache import bucket_rows

Shape = tuple[int, int]  # (slots of the window, width of the block)
REFERENCE: Shape = (1, 1)  # one row, one token at a time


class ShapePolicy(Protocol):
    """What a window and its width policy ask before a round."""

    def slots_for(self, num_rows: int) -> int:
        """Slots of a window that holds so many rows."""
        ...

    def allows(self, slots: int, width: int) -> bool:
        """Whether a round of this shape may be played."""
        ...

    def widest(self, slots: int, limit: int) -> int:
        """The widest block of at most ``limit`` tokens that may be played in so many slots."""
        ...


class AnyShape:
    """Every width, in the smallest power of two that holds the rows."""

    def slots_for(self, num_rows: int) -> int:
        """The row bucket."""
        return bucket_rows(num_rows)

    def allows(self, slots: int, width: int) -> bool:
        """Always."""
        return True

    def widest(self, slots: int, limit: int) -> int:
        """The limit itself."""
        return limit


class OnlyShapes:
    """The given pairs alone. A row bucket without width 1 is never used.

    Any round may turn out classic: a row near its end, a drafter that is away. Rows that no allowed
    bucket holds tightly play in the next larger one.
    """

    def __init__(self, pairs: Iterable[Shape]):
        given = {*pairs, REFERENCE}
        self._slots = sorted(slots for slots, width in given if width == 1)
        self._pairs = frozenset(pair for pair in given if pair[0] in self._slots)

    @property
    def pairs(self) -> frozenset[Shape]:
        """Every pair that may be played."""
        return self._pairs

    @property
    def max_rows(self) -> int:
        """Most rows that a window may hold."""
        return self._slots[-1]

    @property
    def max_width(self) -> int:
        """The widest block of any row bucket."""
        return max(width for _, width in self._pairs)

    def slots_for(self, num_rows: int) -> int:
        """The smallest allowed row bucket that holds the rows.

        Raises ValueError beyond ``max_rows``: the window's own limit must not exceed it.
        """
        for slots in self._slots:
            if slots >= num_rows:
                return slots
        raise ValueError(f"{num_rows} rows in a window that may hold {self.max_rows}")

    def allows(self, slots: int, width: int) -> bool:
        """Whether the pair was given."""
        return (slots, width) in self._pairs

    def widest(self, slots: int, limit: int) -> int:
        """The widest given block of at most ``limit`` tokens; width 1 is there for every bucket."""
        return max(width for rows, width in self._pairs if rows == slots and width <= limit)
