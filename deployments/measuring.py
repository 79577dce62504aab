"""What rounds cost here, by width: measured once per machine, models and versions, then read from disk.

What one start has no time for, the next ones measure. The server's target and ``dflash-serve generate``
both ask here.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments import __version__
from deployments.kept import read_kept, write_kept
from deployments.machine import backend, mlx_version, processor
from dflash_core.calibration import measure_costs
from dflash_core.costs import RoundCosts
from dflash_core.protocols import Drafter
from dflash_core.target import Target


@dataclass(frozen=True, slots=True)
class Circumstances:
    """All that costs depend on, beside the machine and its software. Another value: measured again."""

    target: str  # fingerprint
    drafter: str  # fingerprint, empty without a drafter
    max_rows: int
    transport: str = "none"  # between target and drafter; none: one process
    threads: int | None = None  # of the BLAS, where the settings give them
    is_packed: bool = False  # whether products unpack the target's weights

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
    kept = read_kept(file, RoundCosts.from_json)
    rows = circumstances.max_rows
    costs = measure_costs(target, drafter, max_rows=rows, budget_s=budget_s, known=kept)
    if file is not None and costs != kept and is_sound():
        write_kept(file, costs.as_json())
    return costs
