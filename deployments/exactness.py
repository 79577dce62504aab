"""What the probe's findings mean for a service: which shapes its rounds may use, and what ``/health`` says.

``strict`` plays only shapes that change no bit, so that a request's tokens depend on nothing but itself,
unless its row had to move: then its tokens so far are read as a prompt, by chunks. Where no block is equal
it declines to classic rounds, and nothing of the drafter's weights is read.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.kept import read_kept, write_kept
from deployments.measuring import Circumstances
from deployments.memory import PREFILL_ROWS
from dflash_core.probe import Findings, probe
from dflash_core.row_cache import bucket_rows
from dflash_core.shapes import AnyShape, OnlyShapes, Shape, ShapePolicy
from dflash_core.target import Target

logger = logging.getLogger("dflash.exactness")


@dataclass(frozen=True, slots=True)
class Exactness:
    """What rounds may use."""

    is_strict: bool
    findings: Findings
    shapes: ShapePolicy
    max_rows: int
    widest: int  # 1: every round is classic
    is_declined: bool = False  # there would be drafts, but no block is equal

    @property
    def prefill_rows(self) -> int:
        """Prompts that are read together: alone where company might change a bit."""
        return 1 if self.is_strict else PREFILL_ROWS

    def as_json(self) -> dict[str, Any]:
        """For ``/health``."""
        return {
            "mode": "strict" if self.is_strict else "near_ties",
            "shapes": self.findings.as_json(),
            "max_rows": self.max_rows,
            "widest": self.widest,
            "note": self.note,
        }

    @property
    def note(self) -> str:
        """In words: what strictness costs here."""
        if not self.is_strict:
            return "rounds of any shape; near ties may turn over; see Exactness in the README"
        rows = "one row at a time" if self.max_rows == 1 else f"up to {self.max_rows} rows together"
        if self.is_declined:
            return f"strict leaves {rows} and classic rounds: no wider block is equal, no drafter is read"
        return f"strict leaves {rows} and blocks of up to {self.widest}"


def judge(findings: Findings, *, is_strict: bool, max_rows: int, widest: int) -> Exactness:
    """What rounds of up to ``max_rows`` rows and ``widest`` tokens may use, given the findings."""
    if not is_strict:
        return Exactness(False, findings, AnyShape(), max_rows, widest)
    # Findings are kept under other settings too: what these never warm or count must not decide.
    most = bucket_rows(max_rows)
    shapes = OnlyShapes(
        (slots, width) for slots, width in findings.equal if slots <= most and width <= widest
    )
    allowed = min(widest, shapes.max_width)
    return Exactness(
        True, findings, shapes, min(max_rows, shapes.max_rows), allowed, is_declined=allowed < min(widest, 2)
    )


def find_out(
    target: Target, shapes: Sequence[Shape], where: Circumstances, cache_dir: Path | None, budget_s: float
) -> Findings:
    """Findings kept from earlier starts under the same circumstances; what they lack is probed, and kept.

    On the MLX thread. What the time does not suffice for is left to the next start.
    """
    file = None if cache_dir is None else cache_dir / f"probe-{where.key}.json"
    kept = read_kept(file, Findings.from_json)
    findings = probe(target, shapes, budget_s=budget_s, known=kept)
    if file is not None and findings != kept:
        write_kept(file, findings.as_json())
    found = [finding.verdict for finding in findings.table.values()]
    logger.info("probe: %s", ", ".join(f"{found.count(v)} {v}" for v in dict.fromkeys(found)) or "nothing")
    return findings
