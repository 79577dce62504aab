"""A text-only Qwen3.5 target, copied so that mlx-vlm loads it.

mlx-vlm knows the family as vision models alone: it wants a vision configuration, sections of the rotary
embedding for time, height and width, and the weights under a vision model's names. It leaves the tower away
when the checkpoint's index names no weights of it; text has the same position in all three sections.
Weights are the same to the bit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_core.checkpoints import TargetSpec, read_target_spec
from dflash_core.checkpoints.weight_files import INDEX, read_weight_files

CONFIG = "config.json"


def is_text_only(target: Path) -> bool:
    """Whether a target's config has no vision part, so that mlx-vlm needs a copy."""
    return "vision_config" not in _read(target)


def write_vision_copy(target: Path, folder: Path) -> Path:
    """Write the copy of ``target`` into the empty ``folder`` and return that.

    Raises CheckpointError: what ``read_target_spec`` refuses.
    """
    spec = read_target_spec(target)
    (folder / CONFIG).write_text(json.dumps(vision_config(_read(target), spec), indent=1))
    weight_map: dict[str, str] = {}
    for header in read_weight_files(target).headers:
        loaded: Any = mx.load(str(header.path), return_metadata=True)
        weights, metadata = loaded
        renamed = {vision_name(name): array for name, array in weights.items()}
        mx.save_safetensors(str(folder / header.path.name), renamed, metadata)
        weight_map |= dict.fromkeys(renamed, header.path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in target.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in (CONFIG, INDEX):
            shutil.copyfile(file, folder / file.name)
    return folder


def vision_config(config: dict[str, Any], spec: TargetSpec) -> dict[str, Any]:
    """The config with what mlx-vlm asks for; a bare text config becomes the text part of a whole one."""
    text = config.get("text_config", config)
    rope = {
        "type": "default",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": spec.partial_rotary_factor,
        "mrope_section": mrope_section(round(spec.head_dim * spec.partial_rotary_factor) // 2),
        "mrope_interleaved": True,
    }
    return config | {
        "model_type": "qwen3_5",
        "text_config": text | {"model_type": "qwen3_5_text", "rope_parameters": rope},
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "out_hidden_size": spec.hidden_size,
            "deepstack_visual_indexes": [],
        },
    }


def mrope_section(pairs: int) -> list[int]:
    """Rotated pairs of a head shared out over time, height and width, as Qwen3.5's 32 are: 11, 11, 10."""
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]


def vision_name(name: str) -> str:
    """A tensor's name in a vision model; mlx-lm's own names say already what they are."""
    if name.startswith("model.") and not name.startswith("model.language_model."):
        return name.replace("model.", "model.language_model.", 1)
    return name


def _read(target: Path) -> dict[str, Any]:
    return json.loads((target / CONFIG).read_text(encoding="utf-8"))
