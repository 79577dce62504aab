"""What ``up`` says while it loads."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve import context

from deployments import up
from tests.deployments.ray_client import wait_until


def test_progress_is_told_from_plain_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``serve.status`` builds what ``serve.run`` builds, and Ray lets only one thread do so at a time."""
    replicas = {"Target": ["STARTING", "RUNNING", "STARTING"], "Router": []}
    deployments = {
        name: {"replicas": [{"state": state} for state in states]} for name, states in replicas.items()
    }
    details: dict[str, Any] = {"applications": {"dflash": {"deployments": deployments}}}
    asked: list[None] = []

    def get_serve_details() -> dict[str, Any]:
        asked.append(None)
        return details

    client = SimpleNamespace(get_serve_details=get_serve_details)
    monkeypatch.setattr(context, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(serve, "status", lambda: pytest.fail("not here"))
    monkeypatch.setattr(up, "PROGRESS_PERIOD_S", 0.01)
    with up._progress("dflash", threading.Event()):
        wait_until(lambda: len(asked) >= 3)
    assert capsys.readouterr().err == "dflash-serve: loading: Router waiting, Target 1 running 2 starting\n"
