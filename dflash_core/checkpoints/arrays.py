"""Arrays of one safetensors file, unread until they are computed with."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import mlx.core as mx


def load_arrays(path: Path) -> "dict[str, mx.array]":
    """Map the tensors of a checked safetensors file; MLX reads a tensor's bytes when it is first used."""
    import mlx.core as mx

    return cast("dict[str, mx.array]", mx.load(str(path)))
