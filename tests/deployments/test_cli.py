"""The command line's frame: exit codes, one clear line per failure, nothing of it on stdout."""

import sys
import types
from dataclasses import dataclass

import pytest

from deployments import __version__, cli
from deployments.settings import Settings
from dflash_core.errors import CheckpointError


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command as a shell would."""

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dflash-serve", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def served(monkeypatch) -> list[Settings]:
    """Replace the server by a list of what it was asked to serve."""
    asked: list[Settings] = []
    stub = types.ModuleType("deployments.up")
    stub.up = asked.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deployments.up", stub)
    return asked


def test_version_is_printed(run):
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"dflash-serve {__version__}\n")


def test_help_shows_the_default_of_each_setting(run):
    outcome = run("up", "--help")
    assert outcome.code == 0
    assert "127.0.0.1" in outcome.out
    assert "dflash-embedded" in outcome.out


def test_unknown_flag_is_wrong_usage(run):
    outcome = run("up", "--no-such-flag")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--no-such-flag" in outcome.err


def test_setting_out_of_range_is_named_in_one_line(run, served):
    outcome = run("up", "--http-port", "70000")
    assert (outcome.code, outcome.out, served) == (2, "", [])
    assert outcome.err.startswith("dflash-serve: http_port: ")
    assert outcome.err.count("\n") == 1


def test_missing_settings_file_is_named_in_one_line(run, served, tmp_path):
    outcome = run("up", "--config", str(tmp_path / "none.yaml"))
    assert (outcome.code, outcome.out, served) == (2, "", [])
    assert "none.yaml" in outcome.err
    assert outcome.err.count("\n") == 1


def test_flags_win_over_the_settings_file_and_absent_flags_do_not(run, served, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("max_rows: 4\nhttp_port: 9999\n")
    names = ("--served-model-name", "one", "--served-model-name", "two")
    outcome = run("up", "--config", str(file), "--max-rows", "8", *names)
    assert outcome.code == 0, outcome.err
    (settings,) = served
    assert (settings.max_rows, settings.http_port, settings.served_model_names) == (8, 9999, ("one", "two"))


@pytest.mark.parametrize("error", [CheckpointError("config.json: no such key"), OSError("disk full")])
def test_expected_failure_is_one_line_and_exit_code_1(run, monkeypatch, error):
    monkeypatch.setattr(cli, "load_settings", _raiser(error))
    outcome = run("up")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", f"dflash-serve: {error}\n")


def test_a_bug_shows_no_stack_trace(run, monkeypatch):
    monkeypatch.setattr(cli, "load_settings", _raiser(ZeroDivisionError("oh")))
    outcome = run("up")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("dflash-serve: internal error: ZeroDivisionError: oh")
    assert outcome.err.count("\n") == 1


def test_ctrl_c_ends_quietly(run, monkeypatch):
    monkeypatch.setattr(cli, "load_settings", _raiser(KeyboardInterrupt()))
    outcome = run("up")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def _raiser(error: BaseException):
    def raise_it(*_):
        raise error

    return raise_it
