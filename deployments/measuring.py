"""What rounds cost here, by width: measured once per machine, models and versions, then read from disk.

What one start has no time for, the next ones measure. The server's target and ``dflash-serve generate``
both ask here.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments import __version__
from deployments.machine import backend, mlx_version, processor
from dflash_core.calibration import measure_costs
from dflash_core.costs import RoundCosts
from dflash_core.protocols import Drafter
from dflash_core.target import Target

logger = logging.getLogger("dflash.measuring")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """All that costs depend on, beside the machine and its software. Another value: measured again."""

    target: str  # fingerprint
    drafter: str  # fingerprint, empty without a drafter
    max_rows: int
    transport: str = "none"  # between target and drafter; none: one process
    threads: int | None = None  # of the BLAS, where the settings give them

    @property
    def key(self) -> str:
        """A file name's worth of this, the machine and its software."""
        facts = {
            **asdict(self),
            "backend": backend(),
            "processor": processor(),
            "mlx": mlx_version(),
            "dflash": __version__,
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def width_costs(
    target: Target,
    drafter: Drafter,
    circumstances: Circumstances,
    cache_dir: Path | None,
    *,
    budget_s: float,
    is_sound: Callable[[], bool] = lambda: True,
) -> RoundCosts:
    """Costs kept from earlier starts under the same circumstances; what they lack is measured, and kept.

    On the MLX thread; takes about ``budget_s`` at most. ``cache_dir`` None keeps nothing, nor is a
    measurement kept that is not sound. A file that cannot be read or written only costs the measurement.
    """
    file = None if cache_dir is None else cache_dir / f"costs-{circumstances.key}.json"
    kept = _read(file) if file is not None else None
    rows = circumstances.max_rows
    costs = measure_costs(target, drafter, max_rows=rows, budget_s=budget_s, known=kept)
    if file is not None and costs != kept and is_sound():
        _write(file, costs)
    return costs


def _read(file: Path) -> RoundCosts | None:
    try:
        return RoundCosts.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _write(file: Path, costs: RoundCosts) -> None:
    """Write beside the file and rename: another process may read it at this moment."""
    fresh = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(costs.as_json()), encoding="utf-8")
        fresh.replace(file)
    except OSError as error:
        logger.info("measured costs are not kept: %s", error)
