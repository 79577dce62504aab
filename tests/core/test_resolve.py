"""From a model's name to a directory, and every way in which the hub says no."""

from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from dflash_core.checkpoints.resolve import resolve, resolve_drafter, resolve_target
from dflash_core.errors import CheckpointError
from dflash_core.pair import DRAFTER, TARGET

RESPONSE = httpx2.Response(404, request=httpx2.Request("GET", "https://hub.invalid/api"))


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Exception | Path) -> list[dict[str, Any]]:
    """Let the hub answer with a folder or an error; return the calls it gets."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **arguments: Any) -> str:
        calls.append({"repo": repo, **arguments})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_embedded_means_the_shipped_pair():
    assert resolve_target("embedded") == TARGET
    assert resolve_drafter("embedded") == DRAFTER


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = answer_with(monkeypatch, tmp_path)
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve_target(str(tmp_path)) == tmp_path
    assert calls == []


def test_a_hub_id_is_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = answer_with(monkeypatch, tmp_path)
    assert resolve("z-lab/Qwen3.5-4B-DFlash") == tmp_path
    (call,) = calls
    assert call["repo"] == "z-lab/Qwen3.5-4B-DFlash"
    assert call["revision"] is None
    assert set(call["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja", "*.txt"}


def test_without_weights_only_small_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = answer_with(monkeypatch, tmp_path)
    resolve_target("Qwen/Qwen3.5-4B", weights=False)
    resolve_drafter("z-lab/Qwen3.5-4B-DFlash", weights=False)
    assert all(set(call["allow_patterns"]) == {"*.json", "*.jinja", "*.txt"} for call in calls)
    assert len(calls) == 2


def test_a_hub_id_can_name_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = answer_with(monkeypatch, tmp_path)
    resolve("z-lab/Qwen3.5-4B-DFlash@9a1996c")
    assert calls[0]["repo"] == "z-lab/Qwen3.5-4B-DFlash"
    assert calls[0]["revision"] == "9a1996c"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (errors.GatedRepoError("401 Client Error", response=RESPONSE), "gated"),
        (errors.RepositoryNotFoundError("404 Client Error", response=RESPONSE), "neither a directory"),
        (errors.RevisionNotFoundError("404 Client Error", response=RESPONSE), "no revision of that name"),
        (errors.LocalEntryNotFoundError("outgoing traffic is disabled"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline mode"), "cannot be reached"),
        (errors.HfHubHTTPError("500 Server Error", response=RESPONSE), "HfHubHTTPError"),
        (httpx2.ConnectError("[Errno -2] Name or service not known"), "ConnectError"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_hub_that_says_no_is_one_clear_error(
    answer: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
):
    answer_with(monkeypatch, answer)
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve("owner/model@main")
    message = str(caught.value)
    assert "owner/model@main" in message
    assert "\n" not in message
    assert "Client Error" not in message


@pytest.mark.parametrize(
    "name",
    ["", "no-such-model", "./no/such/place", "/no/such/place", "../owner/model", "a/b/c", "owner/mo del"],
)
def test_a_name_that_is_neither_path_nor_hub_id_never_reaches_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    calls = answer_with(monkeypatch, Path())
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve(name)
    assert calls == []


def test_a_file_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="a file"):
        resolve(str(tmp_path / "model.safetensors"))
