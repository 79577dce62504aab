"""The part of a target that a drafter borrows: embedding and head, nothing else read from disk."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dflash_core.checkpoints.arrays import load_arrays
from dflash_core.checkpoints.dtypes import activation_dtype
from dflash_core.checkpoints.packed import check_packed
from dflash_core.checkpoints.packing import stays_packed, unpack
from dflash_core.checkpoints.target_config import read_target_files
from dflash_core.checkpoints.target_spec import TargetSpec
from dflash_core.checkpoints.target_tensors import EMBEDDING, HEAD, text_name, text_tensors
from dflash_core.checkpoints.weight_files import WeightFiles

if TYPE_CHECKING:
    import mlx.core as mx

_PARTS: Final = ("weight", "scales", "biases")


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """A target's embedding and head."""

    embedding: Any  # nn.Embedding or nn.QuantizedEmbedding: ids [B, K] -> [B, K, D]
    head: Any  # nn.Linear or nn.QuantizedLinear; None: tied to the embedding
    spec: TargetSpec
    dtype: "mx.Dtype"

    def embed(self, ids: "mx.array") -> "mx.array":
        """Embed token ids [B, K] as [B, K, D]."""
        return self.embedding(ids)

    def logits(self, hidden: "mx.array") -> "mx.array":
        """Project normed hidden states [B, K, D] to logits [B, K, V]."""
        return self.embedding.as_linear(hidden) if self.head is None else self.head(hidden)


def load_embedding_and_head(
    path: Path, *, dtype: "mx.Dtype | None" = None, packed: bool | None = None
) -> EmbeddingAndHead:
    """Load embedding and head of a target checkpoint; the rules of dtype and packing are ``load_target``'s.

    Raises:
        CheckpointError: what ``read_target_spec`` refuses.
        ValueError: a dtype that cannot run here.
    """
    spec, files = read_target_files(path)
    chosen = activation_dtype(spec.dtype, dtype, is_quantized=spec.quantization is not None)
    embedding = _load_module(files, EMBEDDING, spec, chosen)
    head = None if spec.tie_word_embeddings else _load_module(files, HEAD, spec, chosen)
    loaded = EmbeddingAndHead(embedding, head, spec, chosen)
    return loaded if stays_packed(spec, text_tensors(files.tensors), packed) else _unpacked(loaded)


def _unpacked(loaded: EmbeddingAndHead) -> EmbeddingAndHead:
    import mlx.nn as nn

    both = nn.Module()
    both.embedding, both.head = loaded.embedding, loaded.head
    unpack(both)
    return replace(loaded, embedding=both.embedding, head=both.head)


def _load_module(files: WeightFiles, base: str, spec: TargetSpec, dtype: "mx.Dtype") -> Any:
    """Make the module with random weights (lazy, never computed) and put the stored ones in their place."""
    import mlx.core as mx

    module = _empty_module(files, base, spec)
    for name, entry in files.tensors.items():
        part = (text_name(name) or "").removeprefix(f"{base}.")
        if part in _PARTS:
            array = load_arrays(entry.file)[name]
            module[part] = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
    mx.eval(module.parameters())
    return module


def _empty_module(files: WeightFiles, base: str, spec: TargetSpec) -> Any:
    import mlx.nn as nn

    rows, columns = spec.vocab_size, spec.hidden_size
    tensors = text_tensors(files.tensors)
    is_head = base == HEAD
    if f"{base}.scales" not in tensors:
        return nn.Linear(columns, rows, bias=False) if is_head else nn.Embedding(rows, columns)
    bits, group_size = check_packed(base, (rows, columns), tensors)
    if is_head:
        return nn.QuantizedLinear(columns, rows, bias=False, group_size=group_size, bits=bits)
    return nn.QuantizedEmbedding(rows, columns, group_size=group_size, bits=bits)
