"""From the names of a target and its drafter to their directories."""

from pathlib import Path

from deployments.settings import EMBEDDED
from dflash_core.checkpoints import read_drafter_spec, read_target_spec, resolve_drafter, resolve_target
from dflash_core.errors import CheckpointError


def resolve_pair(target: str, drafter: str | None, *, weights: bool = True) -> tuple[Path, Path | None]:
    """Directories of target and drafter, downloaded where the names are hub ids; ``weights`` too, or not.

    Raises CheckpointError. The embedded drafter is the default, so whoever names another target alone is
    told what to say.
    """
    target_path = resolve_target(target, weights=weights)
    drafter_path = resolve_drafter(drafter, weights=weights) if drafter is not None else None
    if weights and drafter == EMBEDDED and drafter_path is not None and target != EMBEDDED:
        spec = read_target_spec(target_path)
        try:
            read_drafter_spec(drafter_path, spec)
        except CheckpointError as error:
            raise CheckpointError(
                f"{target} needs a drafter of its own: say --drafter DIRECTORY or --drafter OWNER/MODEL, or "
                f"--drafter none to do without drafts. The embedded one does not fit ({error})"
            ) from error
    return target_path, drafter_path
