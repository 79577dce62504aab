"""Scripts for Macs, as far as Linux can tell: their logic, flags that Ray knows, files that parse."""

import json
import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.scripts.scripts import start

from deployments import proxy
from deployments.settings import load_settings
from tests.k8s.manifests import K8S, tool

MACS = K8S / "macs"
SCRIPTS = sorted(MACS.glob("*.sh"))


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose ray tells what it was given."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    for name in ("ray", "python", "dflash-serve"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\nenv | grep "^RAY_"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture
def run(venv: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script with a home of its own."""

    def call(script: str, *arguments: str, token: str | None = "secret", **extra: str):
        home = tmp_path / "home"
        (home / ".ray").mkdir(parents=True, exist_ok=True)
        file = home / ".ray" / "auth_token"
        file.unlink(missing_ok=True)
        if token is not None:
            file.write_text(token)
            file.chmod(0o644)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "VENV": str(venv), **extra}
        return subprocess.run(
            ["bash", str(MACS / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def flags(output: str) -> list[str]:
    words = output.splitlines()
    assert words[:2] == ["ray", "start"]
    return words[2:]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck_and_use_nothing_newer_than_bash_3(script: Path) -> None:
    command = [tool("shellcheck"), "-x", "--enable=quote-safe-variables", str(script)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"\| *grep -\w*q", text)  # it ends early, and pipefail takes that for a no
    for newer in ("declare -A", "mapfile", "readarray", "${1,,}", "|&", "local -n"):
        assert newer not in text


@pytest.mark.parametrize(
    ("arguments", "resources"),
    [
        (("head", "target"), {"apple_silicon": 1, "dflash_target": 1}),
        (("worker", "drafter", "10.0.0.1"), {"apple_silicon": 1, "dflash_drafter": 1}),
        (("worker", "both", "10.0.0.1"), {"apple_silicon": 1, "dflash_target": 1, "dflash_drafter": 1}),
    ],
)
def test_rays_own_parser_takes_the_flags(run, arguments: tuple[str, ...], resources: dict[str, int]) -> None:
    made = run("join.sh", *arguments, DRY_RUN="1", NODE_ADDRESS="10.0.0.9")
    assert made.returncode == 0, made.stderr
    given = start.make_context("start", flags(made.stdout)).params  # an unknown flag or a bad value raises
    assert json.loads(given["resources"]) == resources
    assert given["head"] == (arguments[0] == "head")
    assert given["address"] == (None if given["head"] else "10.0.0.1:6379")
    assert (given["node_ip_address"], given["block"]) == ("10.0.0.9", True)
    assert given["object_store_memory"] <= 2 * 10**9  # the most that macOS may have
    assert len(given["temp_dir"]) < 20  # sockets' paths end at 103 bytes
    ports = {name: int(value) for name, value in given.items() if name.endswith("_port") and value}
    first, last = ports.pop("min_worker_port"), ports.pop("max_worker_port")
    assert len(set(ports.values())) == len(ports) >= 6
    assert last - first >= 100
    assert not any(first <= port <= last for port in ports.values())


def test_the_node_gets_the_variables_that_ray_wants_on_a_mac(run, tmp_path: Path) -> None:
    made = run("join.sh", "head", "both", NODE_ADDRESS="10.0.0.9")
    assert made.returncode == 0, made.stderr
    told = dict(line.split("=", 1) for line in made.stdout.splitlines() if line.startswith("RAY_"))
    assert told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    assert told["RAY_AUTH_MODE"] == "token"
    assert proxy.VARIABLES.items() <= told.items()
    assert (tmp_path / "home" / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    assert "secret" not in made.stdout + made.stderr


def test_what_is_missing_is_named_in_one_line(run, tmp_path: Path) -> None:
    missing = {
        "no token in": run("join.sh", "head", "both", token=None, NODE_ADDRESS="10.0.0.9"),
        "no address on en7": run("join.sh", "head", "both", INTERFACE="en7"),
        "no Ray in": run("join.sh", "head", "both", VENV=str(tmp_path / "none")),
    }
    for words, made in missing.items():
        assert (made.returncode, made.stdout) == (1, "")
        assert made.stderr.startswith(f"join.sh: {words}")
        assert made.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [(), ("head",), ("tail", "both"), ("head", "all"), ("worker", "both"), ("head", "both", "x")]
)
def test_wrong_usage_shows_the_usage_and_starts_nothing(run, arguments: tuple[str, ...]) -> None:
    made = run("join.sh", *arguments, NODE_ADDRESS="10.0.0.9")
    assert (made.returncode, made.stdout) == (2, "")
    assert "join.sh worker ROLE HEAD" in made.stderr


def test_the_check_asks_the_doctor_only_if_the_head_answers(run) -> None:
    alone = run("check.sh")
    assert alone.returncode == 0, alone.stdout
    assert ("WARNING  this is Linux" in alone.stdout) == sys.platform.startswith("linux")
    closed = run("check.sh", "127.0.0.1", GCS_PORT="1", NODE_MANAGER_PORT="1", OBJECT_MANAGER_PORT="1")
    assert closed.returncode == 1
    assert "ERROR    127.0.0.1:1 does not answer" in closed.stdout
    assert "doctor" not in closed.stdout
    assert run("check.sh", token=None).returncode == 1


def agents() -> dict[str, dict[str, Any]]:
    """The agents by their labels, filled in by the lines of the README."""
    readme = (MACS / "README.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for line in re.findall(r"^(sed -e .*\.plist) \\$", readme, re.MULTILINE):
        environment = {"PATH": os.environ["PATH"], "HOME": "/Users/me"}
        made = subprocess.run(
            ["bash", "-c", line], cwd=K8S.parent, env=environment, capture_output=True, check=True
        )
        agent = plistlib.loads(made.stdout)
        found[agent["Label"]] = agent
        assert f"~/Library/LaunchAgents/{agent['Label']}.plist" in readme
    return found


def test_the_first_agent_calls_the_script_with_its_words() -> None:
    agent = agents()["org.dflash-serve.ray"]
    script, *words = agent["ProgramArguments"][1:]
    assert (script, words) == (str(MACS / "join.sh"), ["worker", "drafter", "FIRST_ADDRESS"])
    assert agent["KeepAlive"] is True


def test_the_second_agent_starts_the_application_as_the_readme_does_by_hand(run) -> None:
    agent = agents()["org.dflash-serve.up"]
    assert agent["KeepAlive"] is True
    program, command, flag, file = agent["ProgramArguments"]
    assert (program, command, flag) == (f"{K8S.parent}/.venv/bin/dflash-serve", "up", "--config")
    given = agent["EnvironmentVariables"]
    settings = load_settings(Path(file), environment=given)
    assert settings.api_keys_file == Path("/Users/me/.dflash-keys")
    made = run("join.sh", "head", "both", NODE_ADDRESS="10.0.0.9")
    nodes = dict(line.split("=", 1) for line in made.stdout.splitlines() if line.startswith("RAY_"))
    assert {name: value for name, value in given.items() if name.startswith("RAY_")}.items() <= nodes.items()
    assert given["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def test_the_settings_ask_for_what_the_script_gives(run) -> None:
    settings = load_settings(MACS / "serve.yaml", environment={})
    made = run("join.sh", "head", "both", DRY_RUN="1", NODE_ADDRESS="10.0.0.9")
    given = json.loads(start.make_context("start", flags(made.stdout)).params["resources"])
    places = settings.placement
    asked = {name for place in (places.router, places.target, places.drafter) for name in place.resources}
    assert places.router.resources == {"node:__internal_head__": 0.01}  # keys are read there
    assert asked - set(places.router.resources) <= set(given)
    for place, role in ((places.target, "dflash_target"), (places.drafter, "dflash_drafter")):
        assert set(place.resources) == {"apple_silicon", role}
        assert place.resources[role] == given[role]  # one replica of a kind on a Mac
        assert place.resources["apple_silicon"] <= given["apple_silicon"] / 2  # and one of each on one


def test_commands_of_the_readme_call_scripts_that_are_there() -> None:
    text = (MACS / "README.md").read_text(encoding="utf-8")
    words = shlex.split(re.sub("['`]", " ", text))
    called = {word for word in words if word.startswith("k8s/macs/")}
    assert called
    assert all((K8S.parent / word).exists() for word in called), called
