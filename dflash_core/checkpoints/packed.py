"""Affinely quantised weights as MLX stores them: packed integers, and scales and biases per group."""

from collections.abc import Mapping
from typing import Final

from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.errors import CheckpointError

_BITS: Final = (2, 3, 4, 5, 6, 8)
_GROUPS: Final = (32, 64, 128)


def check_packed(base: str, shape: tuple[int, ...], tensors: Mapping[str, TensorEntry]) -> tuple[int, int]:
    """Return bits and group size of an affinely quantised weight, read off its shapes.

    Raises:
        CheckpointError: weight, scales and biases do not fit each other or ``shape``.
    """
    weight, scales, biases = (tensors.get(f"{base}.{part}") for part in ("weight", "scales", "biases"))
    if len(shape) != 2 or weight is None or scales is None or biases is None:
        raise CheckpointError(f'"{base}" is quantised without {base}.biases; expected affine quantisation')
    rows, columns = shape
    is_paired = len(weight.shape) == len(scales.shape) == 2 and biases.shape == scales.shape
    if (
        weight.dtype == "U32"
        and is_paired
        and scales.shape[1]
        and {scales.dtype, biases.dtype} <= set(FLOATS)
    ):
        bits, rest = divmod(weight.shape[1] * 32, columns)
        group, group_rest = divmod(columns, scales.shape[1])
        has_rows = weight.shape[0] == scales.shape[0] == rows
        if has_rows and not rest and not group_rest and bits in _BITS and group in _GROUPS:
            return bits, group
    raise CheckpointError(
        f'{weight.file}: tensor "{base}.weight" is {weight.dtype} {list(weight.shape)} with scales '
        f"{scales.dtype} {list(scales.shape)}; expected {list(shape)} packed in U32 "
        f"with bits in {_BITS} and groups in {_GROUPS}"
    )
