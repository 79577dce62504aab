"""Loading a target: mlx-lm's model class with the checkpoint's weights, in the dtype that runs well here."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash_core.checkpoints.dtypes import activation_dtype
from dflash_core.checkpoints.fields import Fields
from dflash_core.checkpoints.json_file import read_config
from dflash_core.checkpoints.packing import stays_packed, unpack
from dflash_core.checkpoints.target_config import read_target_files, text_section
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.checkpoints.target_tensors import text_tensors
from dflash_core.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

_LOOKED_AT = 2**24  # values at a time: the comparisons need more memory than what they compare


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target in memory. ``model`` is mlx-lm's; its text model is ``model.language_model``."""

    model: Any  # nn.Module, whose attributes have no types
    spec: TargetSpec
    dtype: "mx.Dtype"  # of weights (scales, if packed) and activations


def load_target(path: Path, *, dtype: "mx.Dtype | None" = None, packed: bool | None = None) -> LoadedTarget:
    """Load a dense Qwen3.5 target, full precision or affinely quantised.

    Packed weights stay packed if ``packed``; None: by ``stays_packed``. Without ``dtype`` the stored one is
    kept on a GPU and float32 is taken on the CPU; ``A_log`` is float32 always (float64 in a float64 model).

    Raises:
        CheckpointError: what ``read_target_spec`` refuses, a model that cannot be built from it, or a value
            that is not finite in the chosen dtype.
        ValueError: a dtype that cannot run here.
    """
    spec, files = read_target_files(path)
    chosen = activation_dtype(spec.dtype, dtype, is_quantized=spec.quantization is not None)
    model = _build(path, spec)
    _cast(model, chosen, path)
    if not stays_packed(spec, text_tensors(files.tensors), packed):
        unpack(model)
    return LoadedTarget(model, spec, chosen)


def _build(path: Path, spec: TargetSpec) -> Any:
    """Let mlx-lm build the model. What it must not guess is handed to it; weights stay on disk for now."""
    utils = importlib.import_module("mlx_lm.utils")
    try:
        # Not strict: a tied model's copy of the head is left out. Names and shapes are checked already.
        model, _ = utils.load_model(
            path,
            lazy=True,
            strict=False,
            model_config=_resolved_config(path, spec),
            get_model_classes=_qwen_classes,
        )
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path}: mlx-lm cannot build this model ({type(error).__name__})") from error
    return model


def _qwen_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """mlx-lm has no module named qwen3_5_text, and need not look for one."""
    qwen = importlib.import_module("mlx_lm.models.qwen3_5")
    return qwen.Model, qwen.ModelArgs


def _resolved_config(path: Path, spec: TargetSpec) -> dict[str, Any]:
    text = text_section(Fields(read_config(path), str(path)))
    resolved: dict[str, Any] = {key: text.get(key) for key in text}
    resolved |= {
        "tie_word_embeddings": spec.tie_word_embeddings,
        "head_dim": spec.head_dim,
        "full_attention_interval": _interval(spec),
        "num_experts": 0,
        "rope_parameters": {
            "type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": spec.partial_rotary_factor,
        },
    }
    config: dict[str, Any] = {"model_type": "qwen3_5", "text_config": resolved}
    if spec.quantization is not None:
        # Without per-tensor entries mlx-lm reads bits and group size off each tensor's own shapes.
        bits, group_size = spec.quantization.bits, spec.quantization.group_size
        config["quantization"] = {"bits": bits, "group_size": group_size, "mode": "affine"}
    return config


def _interval(spec: TargetSpec) -> int:
    """Every how many layers one is full attention; more than there are layers if none is."""
    kinds = spec.layer_kinds
    return kinds.index("full") + 1 if "full" in kinds else len(kinds) + 1


def _cast(model: Any, dtype: "mx.Dtype", path: Path) -> None:
    """Cast and check tensor by tensor, so that stored and cast weights are never in memory together."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    parameters = cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))
    while parameters:
        name, array = parameters.pop()
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(_precise(dtype) if name.endswith("A_log") else dtype)
            model.update(tree_unflatten([(name, array)]))
            _require_finite(array, f'{path}: tensor "{name}"')
        mx.eval(array)


def _require_finite(array: "mx.array", what: str) -> None:
    """One value that is none would make every request fail. Packed integers have no such values."""
    import mlx.core as mx

    flat = array.reshape(-1)
    for start in range(0, flat.size, _LOOKED_AT):
        if not mx.isfinite(flat[start : start + _LOOKED_AT]).all().item():
            raise CheckpointError(
                f"{what} has a value that is NaN or infinite in {array.dtype}; expected finite weights"
            )


def _precise(dtype: "mx.Dtype") -> "mx.Dtype":
    import mlx.core as mx

    return dtype if dtype == mx.float64 else mx.float32
