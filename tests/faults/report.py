"""One line for each event, and whether it kept its promise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

HEAD = ("event", "detection ms", "recovery ms", "tokens lost", "errors", "verdict")


@dataclass
class Row:
    """What an event cost. ``misses`` say which promises were broken."""

    event: str
    detection_s: float | None = None
    recovery_s: float | None = None
    num_lost: int = 0
    num_errors: int = 0
    notes: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def require(self, is_kept: bool, promise: str) -> None:
        """Note a broken promise."""
        if not is_kept:
            self.misses.append(promise)

    def require_within(self, seconds: float | None, most: float, what: str) -> None:
        """Note what never happened, or too late."""
        told = "never" if seconds is None else f"{1000 * seconds:.0f} ms"
        self.require(
            seconds is not None and seconds <= most, f"{what}: {told}, promised {1000 * most:.0f} ms"
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        verdict = "MISS: " + "; ".join(self.misses) if self.misses else "ok"
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        times = (_ms(self.detection_s), _ms(self.recovery_s))
        return (self.event, *times, str(self.num_lost), str(self.num_errors), verdict + notes)


def table(rows: Sequence[Row]) -> str:
    """All rows as one table."""
    cells = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)), line[-1]])
        for line in cells
    ]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"
