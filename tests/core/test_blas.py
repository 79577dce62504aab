"""Preparing the BLAS: what is found, what is missing, and one warning for each."""

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from dflash_core import blas

Prepare = Callable[[], blas.BlasReport]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Prepare:
    """The uncached function, as if on Linux with everything in place and MLX not yet imported."""
    caplog.set_level(logging.WARNING, "dflash_core.blas")  # the doctor silences it in its process
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    return blas.prepare.__wrapped__


def fail_to_load(name: str, mode: int) -> object:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def test_the_library_is_loaded_with_global_symbols(prepare: Prepare, monkeypatch: pytest.MonkeyPatch):
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: loaded.append((name, mode)))
    report = prepare()
    assert loaded == [("libopenblas.so.0", ctypes.RTLD_GLOBAL)]
    assert report.library == "libopenblas.so.0"
    assert report.is_fast


def test_nothing_is_warned_about_when_nothing_is_missing(prepare: Prepare, caplog: pytest.LogCaptureFixture):
    prepare()
    assert caplog.records == []


def test_a_missing_library_is_warned_about_once_with_package_cost_and_the_loaders_words(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ctypes, "CDLL", fail_to_load)
    report = prepare()
    assert report.library is None
    assert not report.is_fast
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("libopenblas0-pthread", "27x", "cannot open shared object file"):
        assert part in record.getMessage()


def test_a_missing_compiler_is_warned_about_once(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = prepare()
    assert report.compiler is None
    assert not report.is_fast
    (record,) = caplog.records
    for part in ("package g++", "1.4 times"):
        assert part in record.getMessage()


def test_mlx_imported_too_early_is_reported(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    report = prepare()
    assert report.was_mlx_imported
    assert not report.is_fast
    (record,) = caplog.records
    assert "before" in record.getMessage()


def test_macos_needs_nothing(prepare: Prepare, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", fail_to_load)
    assert prepare() == blas.BlasReport(is_needed=False)
    assert prepare().is_fast


def test_preparing_twice_does_the_work_once():
    assert blas.prepare() is blas.prepare()


@pytest.mark.parametrize(
    ("name", "ours"), [("OPENBLAS_THREAD_TIMEOUT", "16"), ("MLX_CUDA_GRAPH_CACHE_SIZE", "6000")]
)
def test_what_libraries_read_once_is_set_unless_the_operator_did(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, name: str, ours: str
):
    monkeypatch.delenv(name, raising=False)
    prepare()
    assert os.environ[name] == ours
    monkeypatch.setenv(name, "26")
    prepare()
    assert os.environ[name] == "26"


# Where MLX would find the function that multiplies, in a process that imports both as anyone does.
PROGRAM = """
import ctypes, json, sys

import dflash_core
was_first = "mlx.core" not in sys.modules
import mlx.core as mx

mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
address = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
    if start <= address < end:
        library = line.split()[-1]
report, num_threads = dflash_core.blas.prepare(), dflash_core.blas.num_threads()
print(json.dumps([was_first, report.library, report.was_mlx_imported, library, num_threads]))
"""


@pytest.mark.skipif(blas.prepare().library is None, reason="no OpenBLAS here")
def test_importing_the_engine_gives_mlx_the_system_library_for_its_products():
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    was_first, loaded, was_late, library, num_threads = json.loads(done.stdout)
    assert (was_first, loaded, was_late) == (True, blas.LIBRARY, False)
    assert "openblas" in library
    assert num_threads == 1


def test_without_the_library_there_are_no_threads_to_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blas, "prepare", lambda: blas.BlasReport(is_needed=False))
    assert blas.num_threads() is None
