"""The embedded pair: a small trained target and its drafter, shipped with the package (see README.md)."""

from pathlib import Path
from typing import Final

_HERE = Path(__file__).resolve().parent

TARGET: Final[Path] = _HERE / "target"
DRAFTER: Final[Path] = _HERE / "drafter"
