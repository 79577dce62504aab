"""The workflow runs the Makefile's targets, on three kinds of machine, in shell that passes shellcheck."""

import re
import subprocess
from typing import Any

import yaml

from tests.k8s.manifests import ROOT, tool

WORKFLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
)


def commands() -> list[str]:
    return [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_three_kinds_of_machine_check_and_test() -> None:
    job = WORKFLOW["jobs"]["test"]
    kinds = {entry["runs-on"] for entry in job["strategy"]["matrix"]["include"]}
    assert {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"} == kinds
    runs = [step.get("run") for step in job["steps"]]
    assert {"make check", "make test"} <= set(runs)
    assert "make audit" in [step.get("run") for step in WORKFLOW["jobs"]["audit"]["steps"]]


def test_every_target_it_calls_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = {word for text in commands() for word in re.findall(r"\bmake ([a-z]+)", text)}
    assert called >= {"check", "test", "audit", "faults", "soak", "fuzz"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)


def test_the_matrix_covers_the_oldest_and_the_newest_python() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11,<3.14"' in project
    versions = {entry["python"] for entry in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert {"3.11", "3.13"} <= versions


def test_its_shell_passes_shellcheck() -> None:
    checked = 0
    for text in commands():
        script = re.sub(r"\$\{\{[^}]*\}\}", "expression", text)
        run = subprocess.run(
            [tool("shellcheck"), "--shell=bash", "-"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, text + run.stdout
        checked += 1
    assert checked >= 8


def test_a_failure_left_of_a_pipe_fails_its_step() -> None:
    """GitHub's own default is a shell without pipefail."""
    assert any(" | " in text for text in commands())
    assert WORKFLOW["defaults"] == {"run": {"shell": "bash"}}
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert not any("shell" in step for step in steps)


def test_it_may_only_read() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    checkouts = [
        step
        for job in WORKFLOW["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/checkout")
    ]
    assert len(checkouts) == len(WORKFLOW["jobs"])
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
