"""Settings: three sources, one object, and messages that a person can act on."""

from pathlib import Path

import pytest

from deployments.settings import Settings, SettingsError, load_settings


def test_defaults_serve_the_embedded_pair_on_one_machine() -> None:
    settings = load_settings(environment={})
    assert (settings.target, settings.drafter) == ("embedded", "embedded")
    assert settings.served_model_names == ("dflash-embedded", "demo")
    assert (settings.host, settings.http_port) == ("127.0.0.1", 8000)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_rows: 2\nmax_queue: 3\nhttp_port: 8100\n")
    environment = {"DFLASH_MAX_ROWS": "4", "DFLASH_MAX_QUEUE": "5", "OTHER": "x"}
    settings = load_settings(file, {"max_rows": 6, "host": None}, environment)
    assert (settings.max_rows, settings.max_queue, settings.http_port) == (6, 5, 8100)


def test_text_becomes_typed_values() -> None:
    flags = {"max_rows": "8", "served_model_names": "a, b", "window_max_age_s": "1.5"}
    settings = load_settings(flags=flags, environment={})
    assert (settings.max_rows, settings.served_model_names) == (8, ("a", "b"))
    assert settings.window_max_age_s == 1.5


def test_no_drafter_may_be_asked_for() -> None:
    assert load_settings(flags={"drafter": "none"}, environment={}).drafter is None


def test_an_unknown_setting_is_named_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"max_row: there is no such setting \(known: .*max_rows"):
        load_settings(flags={"max_row": 3}, environment={})


def test_every_fault_has_its_line() -> None:
    flags = {"max_rows": 0, "transport": "pigeon", "placement": {"target": {"replicas": 0}}}
    with pytest.raises(SettingsError) as caught:
        load_settings(flags=flags, environment={})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any(line.startswith("placement.target.replicas: ") for line in lines)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"settings\.yaml"):
        load_settings(file, environment={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot be read"):
        load_settings(tmp_path / "absent.yaml", environment={})


def test_a_replica_drains_longer_than_any_row_lives() -> None:
    settings = Settings(window_max_age_s=7, request_timeout_s=11)
    assert settings.grace_s > 18
