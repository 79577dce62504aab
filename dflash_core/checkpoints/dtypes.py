"""In which dtype a checkpoint runs here."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import mlx.core as mx

#: Stored float dtypes that can be run: the safetensors word to the config's word.
FLOATS: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def activation_dtype(stored: str, requested: "mx.Dtype | None", *, is_quantized: bool = False) -> "mx.Dtype":
    """Choose the dtype of weights (scales, if quantised) and activations.

    On the CPU everything runs in float32: bf16 is 5 to 10 times slower there and does not amortise a wide
    verify. On a GPU the stored dtype is kept. ``requested`` overrides both.

    Raises:
        ValueError: ``requested`` is no float dtype, or float64 where it cannot run (a GPU, packed weights).
    """
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if requested is None:
        return (
            mx.float32 if on_cpu else {"bfloat16": mx.bfloat16, "float16": mx.float16}.get(stored, mx.float32)
        )
    if requested not in (mx.bfloat16, mx.float16, mx.float32, mx.float64):
        raise ValueError(
            f"dtype {requested} cannot run a model; expected bfloat16, float16, float32 or float64"
        )
    if requested == mx.float64 and (is_quantized or not on_cpu):
        raise ValueError("float64 runs on the CPU only, and only without quantisation")
    return requested
