"""A fast BLAS, a compiler and room for CUDA's graphs: what MLX wants on Linux before it is imported.

The Linux CPU wheel of MLX carries the reference BLAS: a float32 product of [64, 256] by [256, 8192]
takes 33 ms with it and 1.2 ms with OpenBLAS. A library loaded with global symbols *before* ``mlx.core``
wins the symbol look-up, so ``prepare`` must run before the first import of MLX. On Linux MLX also calls
``g++`` at run time to fuse element-wise operations; without it everything runs unfused, silently.

macOS has Accelerate and Metal: there is nothing to prepare.
"""

import ctypes
import functools
import logging
import os
import shutil
import sys
from dataclasses import dataclass

LIBRARY = "libopenblas.so.0"
PACKAGE = "libopenblas0-pthread"  # Debian's and Ubuntu's name
COMPILER = "g++"
# An idle OpenBLAS thread spins for 2^26 cycles, giving its core back call by call, before it sleeps: on a
# machine with few cores it takes them from MLX's own thread and from other replicas. It reads the variable
# when it is loaded and has no call for it. A product here takes about 2^18 cycles.
_SPIN_CYCLES_LOG2 = "16"
# MLX's CUDA backend keeps 400 graphs and builds the rest anew. Rounds of a few row counts, widths and key
# lengths have more: with room for all of them a round of 16 rows takes less than half the time (H200).
_NUM_CUDA_GRAPHS = "6000"
_VARIABLES = {
    "OPENBLAS_THREAD_TIMEOUT": _SPIN_CYCLES_LOG2,
    "MLX_CUDA_GRAPH_CACHE_SIZE": _NUM_CUDA_GRAPHS,
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What ``prepare`` found. ``is_needed`` is false where MLX brings its own fast arithmetic (macOS)."""

    is_needed: bool
    library: str | None = None  # the library that was loaded; None: none was
    loader_error: str | None = None  # the dynamic loader's own words when it failed
    compiler: str | None = None  # where g++ is; None: not on PATH
    was_mlx_imported: bool = False  # MLX came first: the library may have no effect

    @property
    def is_fast(self) -> bool:
        """Whether MLX's CPU backend runs as fast as it can here."""
        if not self.is_needed:
            return True
        return self.library is not None and self.compiler is not None and not self.was_mlx_imported


@functools.cache
def prepare() -> BlasReport:
    """Load OpenBLAS for MLX to find, look for g++, and warn once about each that is missing.

    Idempotent: the first call does the work, later ones return its report. Raises nothing.
    """
    if not sys.platform.startswith("linux"):
        return BlasReport(is_needed=False)
    was_mlx_imported = "mlx.core" in sys.modules
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)  # noqa: TID251  (neither library has another way in)
    loader_error = _load_library()
    report = BlasReport(
        is_needed=True,
        library=LIBRARY if loader_error is None else None,
        loader_error=loader_error,
        compiler=shutil.which(COMPILER),
        was_mlx_imported=was_mlx_imported,
    )
    _warn(report)
    return report


def num_threads() -> int | None:
    """How many threads the library computes with in this process; None where MLX brings its own."""
    if prepare().library is None:
        return None
    return int(ctypes.CDLL(LIBRARY).openblas_get_num_threads())


def _load_library() -> str | None:
    """Load the library with global symbols; return the loader's error, or None."""
    try:
        ctypes.CDLL(LIBRARY, ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return None


def _warn(report: BlasReport) -> None:
    if report.library is None:
        _logger.warning(
            "No OpenBLAS: float32 matrix products on the CPU are 27x slower. "
            "Install the package %s (the loader said: %s).",
            PACKAGE,
            report.loader_error,
        )
    elif report.was_mlx_imported:
        _logger.warning(
            "MLX was imported before OpenBLAS was loaded and may keep its reference BLAS: float32 matrix "
            "products on the CPU can be 27x slower. Import dflash_core before mlx."
        )
    if report.compiler is None:
        _logger.warning(
            "No %s on PATH: MLX cannot fuse operations on the CPU and runs them one by one; rounds take "
            "about 1.4 times as long. Install the package g++.",
            COMPILER,
        )
