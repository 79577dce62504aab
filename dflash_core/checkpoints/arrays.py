"""Arrays of one safetensors file, unread until they are computed with."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_core.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx


def load_arrays(path: Path) -> "dict[str, mx.array]":
    """Map the tensors of a checked safetensors file; MLX reads a tensor's bytes when it is first used.

    Raises CheckpointError where MLX knows a dtype of the format not, or the file is another by now.
    """
    import mlx.core as mx

    try:
        return cast("dict[str, mx.array]", mx.load(str(path)))
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: MLX cannot read it ({type(error).__name__})") from error
