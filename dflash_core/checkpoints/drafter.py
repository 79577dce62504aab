"""Reading and loading z-lab DFlash drafters, the first release's layout and today's."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.checkpoints.arrays import load_arrays
from dflash_core.checkpoints.drafter_config import num_target_layers, parse_drafter_config
from dflash_core.checkpoints.drafter_spec import DrafterSpec
from dflash_core.checkpoints.drafter_tensors import check_drafter_tensors
from dflash_core.checkpoints.dtypes import FLOATS
from dflash_core.checkpoints.fields import Fields
from dflash_core.checkpoints.fingerprint import fingerprint
from dflash_core.checkpoints.json_file import CONFIG, read_config
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.checkpoints.weight_files import read_weight_files
from dflash_core.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx


def read_drafter_spec(path: Path, target: TargetSpec | None) -> DrafterSpec:
    """Read and check a drafter without loading it: config, pairing with its target, tensor names and shapes.

    Raises:
        CheckpointError: another kind of drafter, an unknown key, a value that is missing, impossible or does
            not fit ``target``, a tensor that is missing, extra or misshapen; names key, value and what was
            expected.
    """
    config = read_config(path)
    source = str(path / CONFIG)
    spec = parse_drafter_config(config, source)
    _check_pairing(spec, Fields(config, source), num_target_layers(config, source), target)
    files = read_weight_files(path)
    check_drafter_tensors(spec, files.tensors, str(path))
    dtype = next(FLOATS[entry.dtype] for name, entry in files.tensors.items() if name.endswith("fc.weight"))
    return dataclasses.replace(spec, dtype=dtype, fingerprint=fingerprint(config, files))


def read_block_size(path: Path) -> int:
    """Read a drafter's widest block, from its config alone; raises as ``read_drafter_spec``."""
    return parse_drafter_config(read_config(path), str(path / CONFIG)).block_size


def load_drafter_weights(path: Path, spec: DrafterSpec, dtype: "mx.Dtype") -> "dict[str, mx.array]":
    """Load a drafter's tensors in the target's activation dtype, under names without ``model.``.

    Embedding and head, where an old export has them, are left on disk.

    Raises:
        CheckpointError: tensors that do not fit ``spec``, or a value that is not finite in ``dtype``.
    """
    import mlx.core as mx

    files = read_weight_files(path)
    stored = check_drafter_tensors(spec, files.tensors, str(path))
    arrays: dict[str, mx.array] = {}
    for header in files.headers:
        arrays |= load_arrays(header.path)
    weights = {short: arrays[name].astype(dtype) for short, name in stored.items()}
    del arrays
    finite = {short: mx.isfinite(weight).all() for short, weight in weights.items()}
    mx.eval(finite, weights)
    for short, is_finite in finite.items():
        if not is_finite.item():
            entry = files.tensors[stored[short]]
            raise CheckpointError(
                f'{entry.file}: tensor "{stored[short]}" has a value that is NaN or infinite in {dtype}; '
                "expected finite weights"
            )
    return weights


def _check_pairing(spec: DrafterSpec, top: Fields, num_layers: int | None, target: TargetSpec | None) -> None:
    """Hold the drafter against its target, or against what it says of its target."""
    if target is not None:
        if spec.hidden_size != target.hidden_size:
            raise top.error("hidden_size", f"{target.hidden_size}, the target's")
        if spec.vocab_size != target.vocab_size:
            raise top.error("vocab_size", f"{target.vocab_size}, the target's")
        if num_layers not in (None, target.num_layers):
            raise CheckpointError(
                f'{top.source}: "num_target_layers" is {num_layers}; '
                f"expected {target.num_layers}, the target's"
            )
        num_layers = target.num_layers
    if num_layers is not None and spec.taps[-1] > num_layers - 2:
        # Frameworks disagree on whether the last layer is tapped before or after the final norm.
        raise CheckpointError(
            f'{top.source}: "target_layer_ids" is {list(spec.taps)}; expected layers from 0 to '
            f"{num_layers - 2}: the target has {num_layers}, and its last is never tapped"
        )
