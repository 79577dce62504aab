"""A Serve that runs already is used as it is, or refused with what it has, what was asked, and a way out."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve import context

from deployments.endpoints import Endpoints, endpoints, refuse_others
from deployments.settings import Settings
from dflash_core.errors import Unavailable

WANTED = Endpoints.wanted(Settings(http_port=8123, grpc_port=9123))


def refusal(found: Endpoints) -> str:
    with pytest.raises(Unavailable) as refused:
        refuse_others(found, WANTED)
    return str(refused.value)


def test_the_same_endpoints_are_used_whatever_else_grpc_knows_there():
    refuse_others(WANTED, WANTED)
    refuse_others(replace(WANTED, grpc_functions=WANTED.grpc_functions | {"others.add"}), WANTED)


def test_another_address_is_refused_and_both_are_named():
    said = refusal(replace(WANTED, host="::1", http_port=8000))
    found, _, wanted = said.partition("asked for: ")
    assert "HTTP at [::1]:8000, gRPC on port 9123 (" in found
    assert wanted.startswith("HTTP at 127.0.0.1:8123, gRPC on port 9123 (")
    assert "no HTTP" in refusal(replace(WANTED, host=None))


def test_another_grpc_port_or_missing_services_are_refused_too():
    assert "gRPC on port 9000 (" in refusal(replace(WANTED, grpc_port=9000))
    assert "no gRPC; asked for" in refusal(replace(WANTED, grpc_functions=frozenset()))
    assert "gRPC on port 9123 (others.add);" in refusal(
        replace(WANTED, grpc_functions=frozenset({"others.add"}))
    )


def test_the_refusal_ends_with_a_command_that_serve_would_take():
    from ray.serve.scripts import start

    command = shlex.split(refusal(replace(WANTED, http_port=8000)).partition("or say: ")[2])
    assert command[:2] == ["serve", "start"]
    asked = start.make_context("start", command[2:]).params
    assert (asked["http_host"], asked["http_port"], asked["grpc_port"]) == ("127.0.0.1", 8123, 9123)
    assert set(asked["grpc_servicer_functions"]) == WANTED.grpc_functions


@pytest.mark.parametrize(
    ("address", "states", "goes_on"),
    [
        ("auto", {}, False),
        ("auto", {"dflash": "DELETING"}, False),  # ours, on its way out
        ("auto", {"dflash": "DELETING", "theirs": "RUNNING"}, True),
        (None, {"theirs": "RUNNING"}, False),  # on a cluster of our own, which ends
    ],
)
def test_a_serve_that_we_started_is_stopped_unless_others_came(
    address: str | None, states: dict[str, str], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    applications = {name: SimpleNamespace(status=status) for name, status in states.items()}
    monkeypatch.setattr(context, "_get_global_client", lambda **_: None)  # none runs yet
    monkeypatch.setattr(serve, "start", lambda **_: done.append("start"))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(serve, "shutdown", lambda: done.append("shutdown"))
    told: list[str] = []
    with endpoints(Settings(address=address), told.append, takes_any=False):
        assert done == ["start"]
    assert done == (["start"] if goes_on else ["start", "shutdown"])
    assert (told[-1] == "Serve goes on: it runs theirs") == goes_on
