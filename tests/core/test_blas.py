"""Preparing the BLAS: what is found, what is missing, and one warning for each."""

import ctypes
import logging
import os
import shutil
import sys
from collections.abc import Callable

import pytest

from dflash_core import blas

Prepare = Callable[[], blas.BlasReport]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """The uncached function, as if on Linux with everything in place and MLX not yet imported."""
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
    assert "g++" in record.getMessage()


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
