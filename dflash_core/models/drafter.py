"""The DFlash draft network: a block of masks completed in one forward against a per-row context.

Keys and values of every layer come from the projected target features of all committed positions
(the context, cached per row) and from the block itself (scratch, written after the context and
overwritten next time). Paper: arXiv 2602.06036; layouts as published by z-lab.
Knows arrays and weights; knows nothing of rows or windows. It owns no embedding and no head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from dflash_core.models.attention import attend, split_heads, write_at
from dflash_core.ops import fastmath


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What the network needs to know besides its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Callable[..., mx.array]  # (x [B, H, T, d], offset=[B]), all of the head, NeoX halves
    mask_token_id: int
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens, None for full attention
    is_causal: tuple[bool, ...]  # per layer: whether a block query sees only earlier positions
    embedding_scale: float = 1.0
    logit_softcap: float | None = None


class FeatureProjection:
    """``fc`` and ``hidden_norm``: tapped streams [.., F] to context features [.., D].

    Runs on the target side, so that D numbers per token cross the wire instead of taps x D.
    """

    def __init__(self, weights: Mapping[str, mx.array], eps: float):
        self._fc, self._norm, self._eps = weights["fc.weight"], weights["hidden_norm.weight"], eps

    def __call__(self, features: mx.array) -> mx.array:
        """[.., F] to [.., D]."""
        return fastmath.rms_norm(features @ self._fc.T, self._norm, self._eps)


class DrafterNetwork:
    """The layer stack. ``embed`` maps ids to hidden states, ``head`` hidden states to logits."""

    def __init__(
        self,
        shape: DrafterShape,
        weights: Mapping[str, mx.array],
        embed: Callable[[mx.array], mx.array],
        head: Callable[[mx.array], mx.array],
    ):
        self.shape = shape
        self._embed, self._head = embed, head
        self._norm = weights["norm.weight"]
        self._layers = [_Layer(shape, weights, i) for i in range(shape.num_layers)]
        # Context keys and values of all layers in one product.
        parts = [
            weights[f"layers.{i}.self_attn.{n}_proj.weight"] for i in range(shape.num_layers) for n in "kv"
        ]
        self._context_kv = mx.concatenate(parts, axis=0)
        self._k_norms = mx.stack([layer.k_norm for layer in self._layers])  # [L, head_dim]

    def extend(
        self, x: mx.array, lengths: mx.array, keys: list[mx.array], values: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Write context features x [B, T, D] at positions ``lengths`` [B] onwards, in every layer.

        Rows whose count is below T leave finite garbage behind it, which the next write covers.
        """
        B, T, _ = x.shape
        s = self.shape
        kv = (x @ self._context_kv.T).reshape(B, T, s.num_layers, 2, s.num_kv_heads, s.head_dim)
        kv = kv.transpose(2, 3, 0, 4, 1, 5)  # [L, 2, B, H, T, d]
        k = fastmath.rms_norm(kv[:, 0], None, s.rms_norm_eps) * self._k_norms[:, None, None, None]
        flat = k.reshape(s.num_layers * B, s.num_kv_heads, T, s.head_dim)
        k = s.rope(flat, offset=mx.tile(lengths, s.num_layers)).reshape(k.shape)
        positions = lengths[:, None] + mx.arange(T)
        keys = [write_at(cache, k[i], positions) for i, cache in enumerate(keys)]
        values = [write_at(cache, kv[i, 1], positions) for i, cache in enumerate(values)]
        return keys, values

    def draft(
        self,
        anchors: mx.array,
        lengths: mx.array,
        width: int,
        keys: list[mx.array],
        values: list[mx.array],
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """Ids [B, width - 1] proposed after each anchor [B]; the anchor has position ``lengths`` [B].

        The caches come back with the block as scratch after each row's context.
        """
        B = anchors.shape[0]
        s = self.shape
        masks = mx.full((B, width - 1), s.mask_token_id, dtype=anchors.dtype)
        h = self._embed(mx.concatenate([anchors[:, None], masks], axis=1)) * s.embedding_scale
        positions = lengths[:, None] + mx.arange(width)
        new_keys: list[mx.array] = []
        new_values: list[mx.array] = []
        for i, layer in enumerate(self._layers):
            mask = self._mask(i, positions, keys[i].shape[2])
            h, k, v = layer(h, keys[i], values[i], positions, mask)
            new_keys.append(k)
            new_values.append(v)
        logits = self._head(fastmath.rms_norm(h[:, 1:], self._norm, s.rms_norm_eps))
        if s.logit_softcap:
            logits = mx.tanh(logits / s.logit_softcap) * s.logit_softcap
        return mx.argmax(logits, axis=-1).astype(mx.int32), new_keys, new_values

    def _mask(self, layer: int, positions: mx.array, num_keys: int) -> mx.array:
        """[B, 1, K, S]: the whole context and the block, cut by causality and window."""
        key = mx.arange(num_keys)
        last = positions if self.shape.is_causal[layer] else positions[:, -1:]
        visible = key <= last[..., None]
        window = self.shape.windows[layer]
        if window is not None:
            visible = visible & (positions[..., None] - key < window)
        return mx.broadcast_to(visible, (*positions.shape, num_keys))[:, None]


class _Layer:
    def __init__(self, shape: DrafterShape, weights: Mapping[str, mx.array], index: int):
        def weight(name: str) -> mx.array:
            return weights[f"layers.{index}.{name}.weight"]

        self.shape = shape
        self.k_norm = weight("self_attn.k_norm")
        self._q_norm = weight("self_attn.q_norm")
        projections = [weight(f"self_attn.{n}_proj") for n in "qkv"]
        self._qkv = mx.concatenate(projections, axis=0)
        self._bounds = [projections[0].shape[0], projections[0].shape[0] + projections[1].shape[0]]
        self._out = weight("self_attn.o_proj")
        self._gate_up = mx.concatenate([weight("mlp.gate_proj"), weight("mlp.up_proj")], axis=0)
        self._down = weight("mlp.down_proj")
        self._norm_in, self._norm_mlp = weight("input_layernorm"), weight("post_attention_layernorm")

    def __call__(
        self, h: mx.array, keys: mx.array, values: mx.array, positions: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        s = self.shape
        q, k, v = mx.split(
            fastmath.rms_norm(h, self._norm_in, s.rms_norm_eps) @ self._qkv.T, self._bounds, axis=-1
        )
        q = fastmath.rms_norm(split_heads(q, s.num_heads), self._q_norm, s.rms_norm_eps).swapaxes(1, 2)
        k = fastmath.rms_norm(split_heads(k, s.num_kv_heads), self.k_norm, s.rms_norm_eps).swapaxes(1, 2)
        v = split_heads(v, s.num_kv_heads).swapaxes(1, 2)
        start = positions[:, 0]
        q, k = s.rope(q, offset=start), s.rope(k, offset=start)
        keys, values = write_at(keys, k, positions), write_at(values, v, positions)
        h = h + attend(q, keys, values, mask, s.head_dim**-0.5) @ self._out.T
        gate, up = mx.split(
            fastmath.rms_norm(h, self._norm_mlp, s.rms_norm_eps) @ self._gate_up.T, 2, axis=-1
        )
        return h + (fastmath.silu(gate) * up) @ self._down.T, keys, values
