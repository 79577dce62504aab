"""Checkpoints on disk: strict readers that name what is wrong, and loaders. Reading needs no MLX.

``read_target_spec`` and ``read_drafter_spec`` check a checkpoint from its config and headers;
``load_target``, ``load_drafter_weights`` and ``load_embedding_and_head`` load one.
"""

from dflash_core.checkpoints.drafter import load_drafter_weights, read_block_size, read_drafter_spec
from dflash_core.checkpoints.drafter_spec import DrafterLayerKind, DrafterSpec, RopeScaling
from dflash_core.checkpoints.embedding import EmbeddingAndHead, load_embedding_and_head
from dflash_core.checkpoints.resolve import resolve, resolve_drafter, resolve_target
from dflash_core.checkpoints.target import LoadedTarget, load_target
from dflash_core.checkpoints.target_config import read_max_context, read_target_spec
from dflash_core.checkpoints.target_spec import Quantization, TargetLayerKind, TargetSpec

__all__ = [
    "DrafterLayerKind",
    "DrafterSpec",
    "EmbeddingAndHead",
    "LoadedTarget",
    "Quantization",
    "RopeScaling",
    "TargetLayerKind",
    "TargetSpec",
    "load_drafter_weights",
    "load_embedding_and_head",
    "load_target",
    "read_block_size",
    "read_drafter_spec",
    "read_max_context",
    "read_target_spec",
    "resolve",
    "resolve_drafter",
    "resolve_target",
]
