"""How much memory a process here may use, and what raises that."""

import sys
from dataclasses import dataclass

from dflash_core.free_memory import container_room

WIRED_SHARE = (
    0.85  # of unified memory, at the most, for Metal: the rest is the system's (check.sh says the same)
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a process here may use, and where the figure is from."""

    bytes: int
    source: str
    is_wired: bool = False  # Metal's own, which may be raised


def find_limit() -> Limit:
    """Ask the device that MLX computes on: a GPU's memory, or what is available beside other processes.

    Metal's figure is what one process may have, whatever others hold of the same memory: both count.
    """
    import mlx.core as mx

    if (wired := find_wired()) is not None:
        return min(wired, _available(), key=lambda limit: limit.bytes)
    if mx.default_device().type == mx.DeviceType.gpu:
        facts = mx.device_info()
        for name in ("free_memory", "total_memory", "memory_size"):
            if isinstance(size := facts.get(name), int) and size > 0:
                return Limit(size, f"the GPU's {name.replace('_', ' ')}")
    limit = _available()
    group = container_room()
    return limit if group is None or group > limit.bytes else Limit(group, "left of this container's limit")


def find_wired() -> Limit | None:
    """How much Metal wires for a process, if it computes here."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu or not mx.metal.is_available():
        return None
    size = mx.device_info().get("max_recommended_working_set_size")
    if not isinstance(size, int) or size <= 0:
        return None
    return Limit(size, "the GPU's max recommended working set size", is_wired=True)


def wired_advice(need: int, limit: Limit) -> str:
    """How to let Metal have ``need`` bytes, as the end of a sentence; nothing where that is no help."""
    import psutil

    most = int(WIRED_SHARE * psutil.virtual_memory().total)
    if sys.platform != "darwin" or not limit.is_wired or need > most:
        return ""
    return (
        ", or let Metal wire more of the unified memory: "
        f"sudo sysctl iogpu.wired_limit_mb={most // 2**20} (until the next restart)"
    )


def _available() -> Limit:
    import psutil

    memory = psutil.virtual_memory()
    return Limit(memory.available, f"available of {gib(memory.total).strip()}")


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:9.2f} GiB"
