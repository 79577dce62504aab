"""The Makefile under the make that macOS ships: 3.81 knows no ``.SHELLFLAGS``, so bash runs without -e."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.k8s.manifests import ROOT, tool


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("fails", ["export", "requirements", "--editable", "nothing"])
def test_an_installation_of_which_a_part_failed_is_not_taken_for_done(tmp_path: Path, fails: str) -> None:
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).touch()
    uv = program(
        tmp_path / "bin" / "uv", f'case "$*" in sync*|*{fails}*) exit 1;; esac'
    )  # it cannot reach its index
    pip = program(tmp_path / "venv" / "bin" / "python", f'case "$*" in *{fails}*) exit 1;; esac')
    program(pip.with_name("pip"))
    variables = (".SHELLFLAGS=-c", f"PYTHON={program(tmp_path / 'python')}", "VENV=venv")
    made = subprocess.run(
        [tool("make"), "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), *variables, "venv"],
        env={**os.environ, "PATH": os.pathsep.join([str(uv.parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (made.returncode == 0) == (fails == "nothing"), made.stdout + made.stderr
    assert (tmp_path / "venv" / ".run").exists() == (fails == "nothing")
