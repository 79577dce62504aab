"""What the deployments learn of a model before they load it."""

from pathlib import Path

import pytest

from deployments.engine import LocalEngine
from deployments.generate import GenerateOptions, generate
from deployments.settings import load_settings
from dflash_core.errors import CheckpointError
from tests.core.engine_fixtures import write_pair


def test_the_embedded_pair_is_served_under_its_names() -> None:
    card = LocalEngine().open_router(load_settings(environment={})).card
    assert card.names == ("dflash-embedded", "demo")
    assert (card.drafter, card.block_size) == ("embedded", 16)
    assert card.defaults.temperature == 0  # do_sample: false


def test_another_target_without_a_drafter_of_its_own_is_told_what_to_say(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path, "today")
    with pytest.raises(CheckpointError, match="needs a drafter of its own: say --drafter") as caught:
        LocalEngine().open_router(load_settings(flags={"target": str(target)}, environment={}))
    assert "--drafter none" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="--drafter none"):
        generate(GenerateOptions("hello", target=str(target)), out=None)  # type: ignore[arg-type]


def test_a_target_that_is_broken_is_not_taken_for_a_misfit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        LocalEngine().open_router(load_settings(flags={"target": str(tmp_path)}, environment={}))
    assert "--drafter" not in str(caught.value)


def test_drafter_and_target_that_fit_are_taken_by_path(tmp_path: Path) -> None:
    from dflash_core.pair import DRAFTER, TARGET

    flags = {"target": str(TARGET), "drafter": str(DRAFTER)}
    card = LocalEngine().open_router(load_settings(flags=flags, environment={})).card
    assert (card.names, card.drafter) == (("target",), "drafter")  # no path, which others need not know
    with_embedded = load_settings(flags={"target": str(TARGET)}, environment={})
    assert LocalEngine().open_router(with_embedded).card.block_size == 16


def test_a_router_whose_lanes_are_elsewhere_reads_no_weights(tmp_path: Path) -> None:
    from dflash_core.pair import DRAFTER, TARGET

    for source in (TARGET, DRAFTER):
        folder = tmp_path / source.name
        folder.mkdir()
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja", ".txt"):
                (folder / file.name).write_bytes(file.read_bytes())
    flags = {
        "target": str(tmp_path / TARGET.name),
        "drafter": str(tmp_path / DRAFTER.name),
        "remote_lanes": "macs:9000",
        "local_lanes": "false",
    }
    parts = LocalEngine().open_router(load_settings(flags=flags, environment={}))
    whole = LocalEngine().open_router(load_settings(environment={}))
    assert (parts.card.max_context, parts.card.block_size) == (whole.card.max_context, whole.card.block_size)
    assert parts.tokenizer.vocab_size == whole.tokenizer.vocab_size
