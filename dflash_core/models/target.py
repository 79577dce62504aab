"""The Qwen3.5 target over mlx-lm's loaded weights: an own forward, no monkey-patching.

It differs from mlx-lm's forward in three ways: attention reads and writes left-aligned row caches,
gated-delta layers hand back a journal instead of a new state, and the residual stream is recorded
after each tapped layer (HF's ``hidden_states[l + 1]``), before the final norm.
Knows one layer stack and arrays; knows nothing of rows, windows or sampling.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_core.models.attention import attend, split_heads, write_at
from dflash_core.models.linear import FusedLinear
from dflash_core.ops import fastmath, gated_delta
from dflash_core.ops.gated_delta import Journal

# q, k, v, log decay, beta of a gated-delta layer; shapes as in ops.gated_delta.run_block.
RecurrenceInputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


@dataclass(frozen=True, slots=True)
class CacheArrays:
    """What a forward reads: per attention layer keys and values, stacked recurrent states."""

    keys: list[mx.array]  # each [B, Hkv, S, D]
    values: list[mx.array]  # each [B, Hkv, S, D]
    states: mx.array  # [Lg, B, Hv, Dv, Dk]
    conv: mx.array  # [Lg, B, C - 1, N]  last inputs of the causal convolution


@dataclass(frozen=True, slots=True)
class BlockJournal:
    """Journals of all gated-delta layers of one block, stacked."""

    delta: Journal
    conv_input: mx.array  # [Lg, B, C - 1 + T, N]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands, the same for every attention layer."""

    lengths: mx.array  # [B]
    positions: mx.array  # [B, T]
    mask: mx.array  # [B, 1, T, S]

    @staticmethod
    def of(lengths: mx.array, num_tokens: int, num_keys: int) -> "Place":
        """A block of ``num_tokens`` after each row's length, before a cache of ``num_keys`` slots."""
        positions = lengths[:, None] + mx.arange(num_tokens)
        return Place(lengths, positions, (mx.arange(num_keys) <= positions[..., None])[:, None])


class AttentionLayer:
    """Full attention with a gate, over mlx-lm's ``Qwen3NextAttention`` weights."""

    def __init__(self, module: Any):
        self._qkv = FusedLinear([module.q_proj, module.k_proj, module.v_proj])
        self._out = module.o_proj
        self._q_norm, self._k_norm = module.q_norm, module.k_norm
        self._rope = module.rope
        self._scale = module.scale
        self.num_heads, self.num_kv_heads = module.num_attention_heads, module.num_key_value_heads
        self.head_dim = module.head_dim

    def __call__(
        self, x: mx.array, keys: mx.array, values: mx.array, place: "Place"
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Output [B, T, D] and the caches with the block written at each row's length."""
        B, T, _ = x.shape
        q, k, v = self._qkv.split(x)
        q, gate = mx.split(split_heads(q, self.num_heads), 2, axis=-1)
        q = fastmath.rms_norm(q, self._q_norm.weight, self._q_norm.eps).swapaxes(1, 2)
        k = split_heads(k, self.num_kv_heads)
        k = fastmath.rms_norm(k, self._k_norm.weight, self._k_norm.eps).swapaxes(1, 2)
        v = split_heads(v, self.num_kv_heads).swapaxes(1, 2)
        q, k = self._rope(q, offset=place.lengths), self._rope(k, offset=place.lengths)
        keys, values = write_at(keys, k, place.positions), write_at(values, v, place.positions)
        y = attend(q, keys, values, place.mask, self._scale)
        return self._out(y * fastmath.sigmoid(gate.reshape(B, T, -1))), keys, values


class GatedDeltaLayer:
    """Gated delta net over mlx-lm's ``GatedDeltaNet`` weights."""

    def __init__(self, module: Any):
        self._in = FusedLinear([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a])
        self._out = module.out_proj
        # Constants are made once, as arrays of their own: an index or an exponential in the forward
        # would be an operation of every round.
        weight = module.conv1d.weight
        self._taps = [mx.contiguous(weight[:, j, 0]) for j in range(weight.shape[1])]  # C times [N]
        self._rate = -fastmath.exp(module.A_log)  # [Hv]
        self._dt_bias = module.dt_bias
        self._norm_weight, self._norm_eps = module.norm.weight, module.norm.eps
        self.num_k_heads, self.num_v_heads = module.num_k_heads, module.num_v_heads
        self.k_dim, self.v_dim = module.head_k_dim, module.head_v_dim
        self.conv_size, self.conv_dim = module.conv_kernel_size, module.conv_dim
        scales = [self.k_dim**-1.0] * self.num_k_heads + [self.k_dim**-0.5] * self.num_k_heads
        self._qk_scale = mx.array(scales, dtype=weight.dtype)[:, None]  # q also carries the readout scale
        self._read_prompt = gated_delta.prompt_way(self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim)
        mx.eval(self._taps, self._rate, self._qk_scale)

    def _project(self, x: mx.array, conv: mx.array) -> tuple[RecurrenceInputs, mx.array, mx.array]:
        """Inputs of the recurrence (q, k, v, log decay, beta), the output gate, the conv input."""
        B, T, _ = x.shape
        qkv, z, b, a = self._in.split(x)
        conv_input = mx.concatenate([conv, qkv], axis=1)  # [B, C - 1 + T, N]
        mixed = conv_input[:, :T] * self._taps[0]
        for j in range(1, self.conv_size):
            mixed = mixed + conv_input[:, j : j + T] * self._taps[j]
        mixed = fastmath.silu(mixed)
        key_width = self.k_dim * self.num_k_heads
        qk, v = mx.split(mixed, [2 * key_width], axis=-1)
        eps = 1e-6 / self.k_dim  # the reference adds 1e-6 to the sum of squares, rms_norm to the mean
        qk = fastmath.rms_norm(split_heads(qk, 2 * self.num_k_heads), None, eps) * self._qk_scale
        q, k = mx.split(qk, 2, axis=2)
        v = split_heads(v, self.num_v_heads)
        wide = self._rate.dtype
        log_g = gated_delta.log_decay(a, self._rate, self._dt_bias)
        beta = fastmath.sigmoid(b.astype(wide))
        return (q.astype(wide), k.astype(wide), v.astype(wide), log_g, beta), z, conv_input

    def _finish(self, y: mx.array, z: mx.array, dtype: mx.Dtype) -> mx.array:
        B, T = y.shape[:2]
        y = fastmath.rms_norm(y.astype(dtype), self._norm_weight, self._norm_eps)
        gate = fastmath.silu(split_heads(z, self.num_v_heads).astype(self._rate.dtype))
        y = (gate * y.astype(self._rate.dtype)).astype(dtype)
        return self._out(y.reshape(B, T, -1))

    def verify(self, x: mx.array, state: mx.array, conv: mx.array) -> tuple[mx.array, Journal, mx.array]:
        """Output [B, T, D], the journal and the conv input; the state is only read."""
        inputs, z, conv_input = self._project(x, conv)
        y, journal = gated_delta.run_block(*inputs, state)
        return self._finish(y, z, x.dtype), journal, conv_input

    def prefill(
        self, x: mx.array, state: mx.array, conv: mx.array, counts: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Output [B, T, D] and the state and conv window after each row's first ``counts`` tokens."""
        inputs, z, conv_input = self._project(x, conv)
        y, state = self._read_prompt(*inputs, state, counts)
        return self._finish(y, z, x.dtype), state, conv_after(conv_input, counts, self.conv_size)


def conv_after(conv_input: mx.array, counts: mx.array, conv_size: int) -> mx.array:
    """The C - 1 inputs that end at each row's ``counts`` [B]; layers may be stacked in front."""
    index = counts[:, None] + mx.arange(conv_size - 1)  # [B, C - 1]
    shape = (*conv_input.shape[:-2], conv_size - 1, conv_input.shape[-1])
    return mx.take_along_axis(conv_input, mx.broadcast_to(index[..., None], shape), axis=-2)


class DecoderLayer:
    """One block of the residual stream; ``mixer`` is either kind of attention."""

    def __init__(self, module: Any):
        self.mixer = (
            GatedDeltaLayer(module.linear_attn) if module.is_linear else AttentionLayer(module.self_attn)
        )
        self._norm_in, self._norm_mlp = module.input_layernorm, module.post_attention_layernorm
        self._gate_up = FusedLinear([module.mlp.gate_proj, module.mlp.up_proj])
        self._down = module.mlp.down_proj

    def normed(self, x: mx.array) -> mx.array:
        """The mixer's input."""
        return fastmath.rms_norm(x, self._norm_in.weight, self._norm_in.eps)

    def mlp(self, x: mx.array) -> mx.array:
        """x plus its MLP."""
        gate, up = self._gate_up.split(fastmath.rms_norm(x, self._norm_mlp.weight, self._norm_mlp.eps))
        return x + self._down(fastmath.silu(gate) * up)


class TargetNetwork:
    """The whole stack; ``taps`` are the layers whose output stream is recorded."""

    def __init__(self, language_model: Any, taps: tuple[int, ...]):
        inner = language_model.model
        self._embed = inner.embed_tokens
        self._norm = inner.norm
        self._head = None if language_model.args.tie_word_embeddings else language_model.lm_head
        self.layers = [DecoderLayer(layer) for layer in inner.layers]
        self.taps = taps
        self.is_packed = any(hasattr(layer, "scales") for layer in language_model.modules())

    def logits(self, hidden: mx.array) -> mx.array:
        """[.., D] after the final norm to [.., V]."""
        return self._embed.as_linear(hidden) if self._head is None else self._head(hidden)

    def verify(
        self, tokens: mx.array, lengths: mx.array, caches: CacheArrays
    ) -> tuple[mx.array, mx.array, CacheArrays, BlockJournal]:
        """Run a block [B, K] whose first token of row b has position ``lengths[b]``.

        Returns hidden states after the final norm [B, K, D], features [B, K, F], caches with the
        block's keys and values written (recurrent states untouched) and the journal.
        """
        stream = _Stream(self, tokens, lengths, caches)
        journals: list[Journal] = []
        conv_inputs: list[mx.array] = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, GatedDeltaLayer):
                at = len(journals)
                y, journal, conv_input = layer.mixer.verify(
                    layer.normed(stream.x), stream.states[at], stream.convs[at]
                )
                journals.append(journal)
                conv_inputs.append(conv_input)
                stream.add(index, layer, y)
            else:
                stream.attend(index, layer)
        journal = Journal(
            delta=mx.stack([j.delta for j in journals]),
            k=mx.stack([j.k for j in journals]),
            decay=mx.stack([j.decay for j in journals]),
        )
        written = CacheArrays(stream.keys, stream.values, caches.states, caches.conv)
        hidden = fastmath.rms_norm(stream.x, self._norm.weight, self._norm.eps)
        return hidden, stream.features(), written, BlockJournal(journal, mx.stack(conv_inputs))

    def commit(self, journal: BlockJournal, caches: CacheArrays, counts: mx.array) -> CacheArrays:
        """Recurrent state after the first ``counts`` [B] inputs of each row; 0 leaves a row as it was."""
        conv_size = journal.conv_input.shape[-2] - journal.delta.decay.shape[-1] + 1
        return CacheArrays(
            keys=caches.keys,
            values=caches.values,
            states=gated_delta.state_after(journal.delta, caches.states, counts),
            conv=conv_after(journal.conv_input, counts, conv_size),
        )

    def prefill(
        self,
        tokens: mx.array,
        lengths: mx.array,
        counts: mx.array,
        caches: CacheArrays,
        *,
        is_whole: bool = False,
    ) -> tuple[mx.array, mx.array, CacheArrays]:
        """Run prompt tokens [B, T], ``counts`` [B] of them real.

        Returns the hidden state after the final norm of each row's last real token [B, D] (of all tokens
        [B, T, D] if ``is_whole``), features [B, T, F] and caches.
        """
        stream = _Stream(self, tokens, lengths, caches)
        states: list[mx.array] = []
        convs: list[mx.array] = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, GatedDeltaLayer):
                at = len(states)
                y, state, conv = layer.mixer.prefill(
                    layer.normed(stream.x), stream.states[at], stream.convs[at], counts
                )
                states.append(state)
                convs.append(conv)
                stream.add(index, layer, y)
            else:
                stream.attend(index, layer)
        hidden = stream.x
        if not is_whole:
            last = mx.maximum(counts - 1, 0)[:, None, None]
            hidden = mx.take_along_axis(hidden, last, axis=1)[:, 0]
        hidden = fastmath.rms_norm(hidden, self._norm.weight, self._norm.eps)
        written = CacheArrays(stream.keys, stream.values, mx.stack(states), mx.stack(convs))
        return hidden, stream.features(), written

    @property
    def embed(self) -> Any:
        """The embedding module (``__call__`` and ``as_linear``)."""
        return self._embed


class _Stream:
    """The residual stream on its way through the layers, with its taps and attention caches."""

    def __init__(self, network: TargetNetwork, tokens: mx.array, lengths: mx.array, caches: CacheArrays):
        self.x = network.embed(tokens)
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self._taps = set(network.taps)
        self._tapped: list[mx.array] = []
        self._caches = caches
        num_keys = caches.keys[0].shape[2] if caches.keys else 0
        self._place = Place.of(lengths, tokens.shape[1], num_keys)
        # One operation for all layers; an index per layer would be one each.
        self.states = _layers(caches.states)
        self.convs = _layers(caches.conv)

    def attend(self, index: int, layer: DecoderLayer) -> None:
        """Run an attention layer and remember its caches."""
        assert isinstance(layer.mixer, AttentionLayer)
        at = len(self.keys)
        y, keys, values = layer.mixer(
            layer.normed(self.x), self._caches.keys[at], self._caches.values[at], self._place
        )
        self.keys.append(keys)
        self.values.append(values)
        self.add(index, layer, y)

    def add(self, index: int, layer: DecoderLayer, y: mx.array) -> None:
        """Add a mixer's output, run the MLP, tap."""
        self.x = layer.mlp(self.x + y)
        if index in self._taps:
            self._tapped.append(self.x)

    def features(self) -> mx.array:
        """Tapped streams in ascending layer order, side by side: [B, T, F].

        Without taps F is 1 and means nothing: MLX's CUDA backend cannot take an empty array.
        """
        if not self._tapped:
            return self.x[..., :1]
        return mx.concatenate(self._tapped, axis=-1)


def _layers(stacked: mx.array) -> list[mx.array]:
    """The layers of [L, ...], apart."""
    if stacked.shape[0] == 0:
        return []
    return [mx.squeeze(layer, axis=0) for layer in mx.split(stacked, stacked.shape[0], axis=0)]
