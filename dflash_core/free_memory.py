"""How much of the machine's memory a process may still take, in a container too."""

from pathlib import Path

import psutil


def free_bytes() -> int:
    """What is available beside other processes, or what this container's limit leaves of it."""
    available = psutil.virtual_memory().available
    room = container_room()
    return available if room is None else min(available, room)


def container_room(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves; None without one. Version 2 only. Page cache counts as free."""
    try:
        most = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return None if most == "max" else max(0, int(most) - used + cached)
    except (OSError, ValueError, IndexError):
        return None
