"""Starting a Ray node: a late one gets a second try, other failures are one line at once; its token."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
import ray
from ray._private.node import Node

from deployments.cluster import _prepare_token, hushed, start_node
from dflash_core.errors import Unavailable

LATE = "The current node timed out during startup.\nThis could happen because ..."


class FakeNode(Node):
    """A node whose start fails after some processes."""

    def __init__(self, words: str):
        self.is_cleared = False
        nodes.append(self)
        raise Exception(words)

    def kill_all_processes(self, *args: object, **options: object) -> None:
        self.is_cleared = True


nodes: list[FakeNode] = []
asked: list[dict[str, object]] = []  # options of each start


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What successive starts say; no more: they go well."""
    words: list[str] = []
    nodes.clear()
    asked.clear()

    def init(**options: object) -> None:
        asked.append(options)
        if words:
            FakeNode(words.pop(0))

    monkeypatch.setattr(ray, "init", init)
    return words


def test_a_late_node_gets_a_second_try_and_the_first_ones_processes_end(failures: list[str]) -> None:
    failures.append(LATE)
    said: list[str] = []
    start_node(said.append)
    assert len(said) == 1
    assert [node.is_cleared for node in nodes] == [True]


def test_a_node_that_is_late_twice_is_one_line(failures: list[str]) -> None:
    failures += [LATE, LATE]
    with pytest.raises(Unavailable, match=r"did not start: The current node timed out") as caught:
        start_node(lambda line: None)
    assert "\n" not in str(caught.value)
    assert [node.is_cleared for node in nodes] == [True, True]


def test_another_failure_is_told_at_once(failures: list[str]) -> None:
    failures.append("no such directory: /x")
    with pytest.raises(Unavailable, match="did not start: no such directory"):
        start_node(lambda line: pytest.fail(line))
    assert len(nodes) == 1


def test_a_node_of_our_own_is_started_whatever_cluster_the_environment_names(failures: list[str]) -> None:
    start_node(lambda line: pytest.fail(line), num_cpus=2)
    assert (asked[0]["address"], asked[0]["num_cpus"]) == ("local", 2)


def test_what_ray_prints_on_the_way_out_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with hushed():
        print("(raylet) Task ServeController.graceful_shutdown failed")
        print("noise", file=sys.stderr)
    with contextlib.suppress(ZeroDivisionError), hushed():
        raise ZeroDivisionError
    print("ready")
    assert capsys.readouterr() == ("ready\n", "")


TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepared(monkeypatch: pytest.MonkeyPatch, home: Path, **given: str) -> dict[str, str]:
    """What Ray is told of its token where the environment has ``given``."""
    for name in TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(home), **given}.items():
        monkeypatch.setenv(name, value)
    _prepare_token()
    told = {name: os.environ[name] for name in TOKEN_VARIABLES if name in os.environ}
    for name in TOKEN_VARIABLES:  # what was set here is nobody else's
        os.environ.pop(name, None)
    return told


def test_token_authentication_is_on_and_its_token_is_rays_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert prepared(monkeypatch, tmp_path) == {"RAY_AUTH_MODE": "token"}
    assert (tmp_path / ".ray").is_dir()  # where Ray makes and keeps it


def test_where_no_token_can_be_kept_each_run_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "a file"
    home.touch()
    first, second = prepared(monkeypatch, home), prepared(monkeypatch, home)
    assert first["RAY_AUTH_MODE"] == second["RAY_AUTH_MODE"] == "token"
    assert len(bytes.fromhex(first["RAY_AUTH_TOKEN"])) == 32
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_token_that_is_kept_already_is_used_wherever_nothing_may_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (tmp_path / ".ray").mkdir()
    assert "RAY_AUTH_TOKEN" in prepared(monkeypatch, tmp_path)
    (tmp_path / ".ray" / "auth_token").write_text("kept")
    assert "RAY_AUTH_TOKEN" not in prepared(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/mine"},
    ],
)
def test_what_is_said_about_the_token_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str]
) -> None:
    home = tmp_path / "a file"
    home.touch()
    assert prepared(monkeypatch, home, **given) == given
