"""The Macs' settings and those of the router on Kubernetes that calls them belong together."""

import json
import shutil
from pathlib import Path

import pytest

from deployments import engine
from deployments.engine import LocalEngine
from deployments.generation import ModelCard
from deployments.remote import remote_lanes
from deployments.remote.lane import RemoteLane
from deployments.settings import Settings, load_settings
from dflash_core.pair import DRAFTER, TARGET
from tests.deployments.other_cluster import other_cluster
from tests.k8s.manifests import K8S, serve_config

LONG = 262144  # positions of a Qwen3.5-4B


@pytest.fixture
def long_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that every name leads to: the embedded target's, with a real one's long context."""
    folder = tmp_path / "target"
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config)["max_position_embeddings"] = LONG
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(engine, "resolve_pair", lambda target, drafter, weights=True: (folder, DRAFTER))
    return folder


def router_settings() -> Settings:
    (application,) = serve_config("overlays/remote-lanes")["applications"]
    arguments = {**application["args"], "remote_key_file": None}
    return load_settings(flags=arguments, environment={})


def macs_card() -> ModelCard:
    settings = load_settings(K8S / "macs" / "serve.yaml", environment={})
    return LocalEngine().open_router(settings).card


async def asked(settings: Settings, card: ModelCard) -> RemoteLane:
    """The router's lane, after it has asked a cluster that serves what the card says."""
    async with other_cluster() as macs:
        macs.backend.model_card = card
        called = settings.model_copy(update={"remote_lanes": (f"127.0.0.1:{macs.port}",)})
        (lane,) = remote_lanes(called, LocalEngine().open_router(called), "us")
        try:
            await lane.ask()
        finally:
            await lane.close()
        return lane


async def test_the_router_of_the_overlay_takes_the_macs_as_they_are_shipped(long_target: Path) -> None:
    lane = await asked(router_settings(), macs_card())
    assert (lane.state, lane.reason) == ("ok", "")


async def test_without_its_three_lines_it_does_not(long_target: Path) -> None:
    ours = router_settings()
    longer = await asked(ours.model_copy(update={"max_context": None}), macs_card())
    assert longer.state == "serves a shorter context"
    assert longer.reason.startswith(f"32768 tokens there, {LONG} here")
    other = Settings(target="embedded", local_lanes=False, remote_lanes=ours.remote_lanes)
    assert (await asked(other, macs_card())).state == "another model"
