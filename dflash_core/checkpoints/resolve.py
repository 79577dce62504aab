"""From a model's name to a directory: the embedded pair, a local path, or a hub id."""

import re
from pathlib import Path
from typing import Final

from dflash_core.errors import CheckpointError
from dflash_core.pair import DRAFTER, TARGET

EMBEDDED: Final = "embedded"
# Weights, configs, chat template and tokenizer; never Python files and never pickles.
_SMALL_FILES: Final = ("*.json", "*.jinja", "*.txt")
_ALLOWED_FILES: Final = ("*.safetensors", *_SMALL_FILES)
_HUB_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95})(@(?P<revision>[\w.\-/]{1,100}))?"
)


def resolve_target(name: str, *, weights: bool = True) -> Path:
    """Return the directory of a target: ``embedded``, a local path or a hub id; raises as ``resolve``."""
    return TARGET if name == EMBEDDED else resolve(name, weights=weights)


def resolve_drafter(name: str, *, weights: bool = True) -> Path:
    """Return the directory of a drafter: ``embedded``, a local path or a hub id; raises as ``resolve``."""
    return DRAFTER if name == EMBEDDED else resolve(name, weights=weights)


def resolve(name: str, *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint: a local path, or a hub id.

    A hub id (``owner/model`` or ``owner/model@revision``) is downloaded, or found in the hub's cache; without
    ``weights`` only its small files.

    Raises:
        CheckpointError: nothing there, a file instead of a directory, or the hub says no (not found, gated,
            no such revision) or cannot be reached.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise CheckpointError(f"{name}: a file; expected a checkpoint directory or a hub id")
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f'"{name}": no such directory, and no hub id; expected "{EMBEDDED}", a checkpoint directory or '
            "owner/model"
        )
    return _download(match["repo"], match["revision"], _ALLOWED_FILES if weights else _SMALL_FILES)


def _download(repo: str, revision: str | None, files: tuple[str, ...]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(files))
    except Exception as error:  # also whatever its HTTP client raises, which is not the hub's to promise
        where = repo if revision is None else f"{repo}@{revision}"
        raise CheckpointError(f"{where}: {_reason(error)}") from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """Put the hub client's error into our words."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "gated on the hub; accept its terms there and log in"
        case errors.RevisionNotFoundError():
            return "the hub has the model, but no revision of that name"
        case errors.RepositoryNotFoundError():
            return "neither a directory here nor a model on the hub that you may read"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return "not in the hub's cache, and the hub cannot be reached; expected a network or a local path"
        case OSError(strerror=str(words)):
            return f"the hub's download failed ({words})"
        case _:
            return f"the hub's download failed ({type(error).__name__})"
