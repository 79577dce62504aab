"""Settings: three sources, one object, and messages that a person can act on."""

from pathlib import Path

import pytest

from deployments.settings import Settings, SettingsError, find_cache_dir, load_settings, model_name


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


def test_a_remote_key_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("remote_key: 123456\n")
    with pytest.raises(SettingsError, match="remote_key: ") as caught:
        load_settings(file, environment={})
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"settings\.yaml"):
        load_settings(file, environment={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: cannot be read"):
        load_settings(tmp_path / "absent.yaml", environment={})


@pytest.mark.parametrize("lanes", ["10.0.0.5", "a:b", "a:1,a:1", ":9000"])
def test_a_remote_lane_is_an_address_and_named_once(lanes: str) -> None:
    with pytest.raises(SettingsError, match="remote_lanes"):
        load_settings(flags={"remote_lanes": lanes}, environment={})


def test_remote_lanes_come_as_text_and_their_key_from_the_environment(tmp_path: Path) -> None:
    settings = load_settings(
        flags={"remote_lanes": "a:1, [::1]:2"}, environment={"DFLASH_REMOTE_KEY": "secret"}
    )
    assert settings.remote_lanes == ("a:1", "[::1]:2")
    assert settings.remote_key is not None
    assert "secret" not in repr(settings)
    with pytest.raises(SettingsError, match="DFLASH_REMOTE_KEY"):
        load_settings(flags={"remote_key": "secret"}, environment={})


def test_without_any_lane_there_is_nowhere_to_play() -> None:
    with pytest.raises(SettingsError, match="nowhere to play"):
        load_settings(flags={"local_lanes": "false"}, environment={})


def test_a_replica_drains_longer_than_any_row_lives() -> None:
    settings = Settings(window_max_age_s=7, request_timeout_s=11)
    assert settings.grace_s > 18


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("mlx-community/Qwen3.5-4B-4bit", "mlx-community/Qwen3.5-4B-4bit"),
        ("mlx-community/Qwen3.5-4B-4bit@v1.0", "mlx-community/Qwen3.5-4B-4bit"),
        ("/models/qwen-4b", "qwen-4b"),
        ("/models/qwen-4b/", "qwen-4b"),
        ("./models/qwen-4b", "qwen-4b"),
        ("~/qwen-4b", "qwen-4b"),
    ],
)
def test_a_model_without_a_served_name_is_called_after_its_target(target: str, name: str) -> None:
    assert load_settings(flags={"target": target}, environment={}).served_model_names == (name,)


def test_a_directory_that_looks_like_a_hub_id_is_called_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert model_name("models/qwen") == "qwen"


def test_a_served_name_that_was_given_stays(tmp_path: Path) -> None:
    flags = {"target": "org/model", "served_model_names": "mine"}
    assert load_settings(flags=flags, environment={}).served_model_names == ("mine",)
    assert load_settings(environment={"DFLASH_TARGET": "org/model"}).served_model_names == ("org/model",)
    file = tmp_path / "settings.yaml"
    file.write_text("target: org/model\nserved_model_names: [a, b]\n")
    assert load_settings(file, environment={}).served_model_names == ("a", "b")


def test_measured_costs_are_kept_in_the_users_cache_directory() -> None:
    home = load_settings(environment={}).cache_dir
    assert home == Path.home() / ".cache" / "dflash-serve"
    moved = load_settings(environment={"XDG_CACHE_HOME": "/var/cache/me"}).cache_dir
    assert moved == Path("/var/cache/me/dflash-serve")


@pytest.mark.parametrize("off", ["", "none"])
def test_the_cache_can_be_turned_off_or_moved(tmp_path: Path, off: str) -> None:
    environment = {"DFLASH_CACHE_DIR": off, "XDG_CACHE_HOME": "/x"}
    assert find_cache_dir(environment) is None
    assert load_settings(environment=environment).cache_dir is None
    file = tmp_path / "settings.yaml"
    file.write_text("cache_dir: null\n")
    assert load_settings(file, environment={}).cache_dir is None
    assert find_cache_dir({"DFLASH_CACHE_DIR": "/c"}) == Path("/c")
    assert load_settings(file, environment={"DFLASH_CACHE_DIR": "/c"}).cache_dir == Path("/c")
    assert load_settings(file, {"cache_dir": "/f"}, {"DFLASH_CACHE_DIR": "/c"}).cache_dir == Path("/f")
