"""Cost of a verify by rows and width, in Qwen3.5-4B's shape with random weights.

    python tests/benchmarks/round_cost.py [--bits 4] [--layers 32] [--shapes 1x1,4x1,1x16,4x16,8x16,16x16]

One forward with commit, and mlx-lm's own model for one row and one token beside it. Prints milliseconds
(least of --repeat), the bytes of the weights and the milliseconds that reading them takes at --bandwidth.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from deployments.bench import machine
from dflash_core.loading import target_cache_shape
from dflash_core.models.target import TargetNetwork
from dflash_core.sampling import pack
from dflash_core.target import BlockInput, Target

QWEN35_4B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def least_ms(play: Callable[[], None], repeat: int) -> float:
    """Least time of ``repeat`` calls after two that are not counted."""
    times: list[float] = []
    for i in range(repeat + 2):
        began = time.perf_counter()
        play()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def main() -> None:
    """Build the model, time the shapes, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, choices=[4, 8, 16], default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shapes", default="1x1,4x1,1x16,4x16,8x16,16x16")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--bandwidth", type=float, default=3.2e12, help="bytes per second")
    options = parser.parse_args()
    print(json.dumps(machine()))
    text_config = QWEN35_4B | {"num_hidden_layers": options.layers}
    model = Model(ModelArgs(model_type="qwen3_5", text_config=text_config))
    model.set_dtype(mx.bfloat16)
    if options.bits < 16:
        nn.quantize(model, group_size=64, bits=options.bits)
    mx.eval(model.parameters())
    leaves: Any = tree_flatten(model.parameters())
    num_bytes = sum(x.nbytes for _, x in leaves)
    print(f"weights {num_bytes / 1e9:.2f} GB, {1e3 * num_bytes / options.bandwidth:.2f} ms to read")
    cache, token = model.make_cache(), mx.array([[1]])
    reference = least_ms(lambda: mx.eval(mx.argmax(model(token, cache=cache), axis=-1)), options.repeat)
    print(f"mlx-lm 1x1: {reference:.2f} ms", flush=True)
    target = build(model, options.layers)
    for shape in options.shapes.split(","):
        rows, width = map(int, shape.split("x"))
        began = time.perf_counter()
        ms = least_ms(lambda r=rows, w=width: verify(target, r, w), options.repeat)
        total = time.perf_counter() - began
        print(
            f"{shape}: {ms:.2f} ms, {ms / reference:.2f} of mlx-lm 1x1 (with compilation {total:.1f} s)",
            flush=True,
        )


def build(model: Any, num_layers: int) -> Target:
    """Our target over the model's weights, with four taps and no projection."""
    from dflash_core.checkpoints.target_spec import TargetLayerKind, TargetSpec

    c = QWEN35_4B
    kinds: tuple[TargetLayerKind, ...] = tuple(
        "full" if (i + 1) % 4 == 0 else "linear" for i in range(num_layers)
    )
    spec = TargetSpec(
        num_layers=num_layers,
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        vocab_size=c["vocab_size"],
        tie_word_embeddings=True,
        max_context=c["max_position_embeddings"],
        layer_kinds=kinds,
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        attention_bias=False,
        linear_key_heads=c["linear_num_key_heads"],
        linear_value_heads=c["linear_num_value_heads"],
        linear_key_dim=c["linear_key_head_dim"],
        linear_value_dim=c["linear_value_head_dim"],
        conv_kernel=c["linear_conv_kernel_dim"],
        rms_norm_eps=c["rms_norm_eps"],
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        dtype="bfloat16",
        quantization=None,
        fingerprint="random",
    )
    return Target(
        TargetNetwork(model.language_model, tuple(range(1, num_layers - 2, max(1, num_layers // 4)))),
        cache_shape=target_cache_shape(spec, mx.bfloat16),
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
    )


_CACHES: dict[int, Any] = {}


def verify(target: Target, rows: int, width: int) -> None:
    """One verify of ``rows`` rows, read back."""
    caches = _CACHES.setdefault(rows, target.new_caches(rows, 256))
    caches.lengths[:] = 64
    budgets = np.full(rows, 1000, dtype=np.int32)
    block = BlockInput(mx.zeros((rows,), dtype=mx.int32), budgets, pack([None] * rows, target.vocab_size))
    target.verify(caches, block, mx.zeros((rows, width - 1), dtype=mx.int32), "per_row").read()
    mx.synchronize()


if __name__ == "__main__":
    assert dflash_core.blas.prepare() is not None
    main()
