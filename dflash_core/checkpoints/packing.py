"""Whether packed weights stay packed: on a GPU they do, on a CPU where float32 would take too much.

MLX's CPU backend unpacks them again for every product: of the embedded pair at 4 bits, 16 rows of one token
take 13 times as long as in float32, and 4 rows of 16 tokens 3 times.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, cast

from dflash_core.checkpoints.safetensors_header import TensorEntry
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.free_memory import free_bytes

SHARE: Final = 0.5  # of the memory that is free, that unpacked weights may take
_FLOAT32: Final = 4


def stays_packed(spec: TargetSpec, tensors: Mapping[str, TensorEntry], requested: bool | None = None) -> bool:
    """Whether a target's packed weights are computed with as they are here. True if none is packed.

    ``requested`` overrides that.
    """
    import mlx.core as mx

    if requested is not None:
        return requested
    if spec.quantization is None or mx.default_device().type == mx.DeviceType.gpu:
        return True
    return unpacked_bytes(spec, tensors) > SHARE * free_bytes()


def unpacked_bytes(spec: TargetSpec, tensors: Mapping[str, TensorEntry]) -> int:
    """Bytes of a target's tensors, or of a part of them, in float32."""
    total = 0
    for name, entry in tensors.items():
        base, _, part = name.rpartition(".")
        is_packed = f"{base}.scales" in tensors
        if not (is_packed and part in ("weight", "biases")):
            group_size = spec.quantization.group_size if spec.quantization and part == "scales" else 1
            total += _FLOAT32 * group_size * math.prod(entry.shape)
    return total


def unpack(module: Any) -> None:
    """Replace the packed layers in a module by plain ones, tensor by tensor: never are both whole in memory.

    Cast scales first: weights come in their dtype, and products then are the packed layers' up to rounding.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model

    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(dequantize_model(module).parameters()))
    while arrays:
        mx.eval(arrays.pop()[1])
