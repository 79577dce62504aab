"""Versions, MLX's backend, the BLAS and the compiler. Imports no MLX: two backends must be told before."""

import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from deployments import __version__
from deployments.doctor.finding import Finding, error, ok, warning
from dflash_core.blas import COMPILER, LIBRARY, PACKAGE, BlasReport

DISTRIBUTION = "dflash-serve"
# Those whose versions decide whether two nodes understand each other, or compute the same.
NAMED = ("ray", "mlx", "mlx-lm", "transformers", "tokenizers", "numpy")
# All of them install one and the same libmlx.
BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
COMPILER_TIMEOUT_S = 30.0


def versions() -> dict[str, str]:
    """What runs here: this project, Python, the named distributions, the platform."""
    found = installed((*NAMED, *BACKENDS))
    return {
        DISTRIBUTION: __version__,
        "python": platform.python_version(),
        **found,
        "platform": f"{sys.platform} {platform.machine()}",
    }


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_versions(requirements: list[str] | None = None) -> Finding:
    """Hold what is installed against what this distribution requires. None: its own metadata."""
    here = versions()
    if requirements is None:
        try:
            requirements = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            requirements = []
    faults = list(_unmet(requirements))
    words = ", ".join(f"{name} {version}" for name, version in here.items())
    if faults:
        remedy = "make venv, which installs the versions of uv.lock"
        return error("versions", "\n".join([words, *faults]), remedy, versions=here)
    return ok("versions", words, versions=here)


def _unmet(requirements: list[str]) -> Iterator[str]:
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed((requirement.name,)).get(requirement.name)
        if version is None:
            yield f"{requirement.name} is not installed, {requirement.specifier} is needed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, {requirement.specifier} is needed"


def check_backends(found: Mapping[str, str] | None = None) -> Finding:
    """Exactly one backend of MLX: all install the same library file, and the last one wins."""
    found = installed(BACKENDS) if found is None else found
    words = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        remedy = (
            "make a fresh environment with one backend: make clean venv for the CPU or Metal, "
            "make venv BACKEND=cuda13 for CUDA, which has an environment of its own"
        )
        return error(
            "backend", f"several MLX backends in one environment: {words}", remedy, backends=[*found]
        )
    if not found:
        return error("backend", "MLX has no backend here", "make venv", backends=[])
    return ok("backend", words, backends=[*found])


def check_blas(report: BlasReport) -> Finding:
    """The library that MLX's CPU backend multiplies with."""
    if not report.is_needed:
        return ok("blas", "MLX brings its own")
    if report.library is None:
        message = f"no OpenBLAS, float32 products on the CPU are 27 times slower ({report.loader_error})"
        return warning("blas", message, f"install {PACKAGE}: sudo apt-get install {PACKAGE}")
    if report.was_mlx_imported:
        return warning("blas", f"{LIBRARY} was loaded after MLX", "import dflash_core before mlx")
    return ok("blas", f"{LIBRARY} is loaded before MLX")


def check_compiler(report: BlasReport) -> Finding:
    """MLX calls g++ at run time to fuse kernels on the CPU; it must find its own headers too."""
    if not report.is_needed:
        return ok("compiler", "Metal compiles its own kernels")
    remedy = "install g++ and its standard library: sudo apt-get install g++"
    if report.compiler is None:
        return warning("compiler", f"no {COMPILER} on PATH: MLX runs its CPU kernels unfused", remedy)
    source = "#include <cmath>\n#include <complex>\nfloat f(float x) { return std::exp(x); }\n"
    command = [report.compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    try:
        run = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as failure:
        return warning("compiler", f"{report.compiler} does not run ({failure})", remedy)
    if run.returncode != 0:
        words = (run.stderr.strip().splitlines() or ["no message"])[0]
        return warning("compiler", f"{report.compiler} cannot compile C++17 ({words})", remedy)
    return ok("compiler", f"{report.compiler} compiles C++17")
