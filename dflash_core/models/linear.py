"""Projections that read the same input, run as one product where launches are what costs.

On a GPU every operation costs (25 us of launch on CUDA), so the weights of projections with one input
are stacked once at load. On the CPU a product costs its arithmetic, and elementwise work on the strided
halves of a stacked output costs more than on outputs of their own: there the layers stay apart.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

AnyLinear = nn.Linear | nn.QuantizedLinear


class FusedLinear:
    """Several bias-compatible linear layers of one input; ``split`` gives each one's output."""

    def __init__(self, layers: Sequence[AnyLinear]):
        self._parts = list(layers) if mx.default_device() == mx.cpu else _stack(layers)
        mx.eval([part.parameters() for part in self._parts])  # lets go of the separate weights
        sizes = [int(layer.weight.shape[0]) for layer in layers]
        self._bounds = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]

    def split(self, x: mx.array) -> list[mx.array]:
        """One output per layer, in order."""
        if len(self._parts) > 1:
            return [part(x) for part in self._parts]
        return list(mx.split(self._parts[0](x), self._bounds, axis=-1))


def _stack(layers: Sequence[AnyLinear]) -> list[AnyLinear]:
    """One layer where the kinds agree, else the layers as they are (mixed quantisation)."""
    first = layers[0]
    if any("bias" in layer for layer in layers):
        return list(layers)
    if all(type(layer) is nn.Linear for layer in layers):
        fused = nn.Linear(1, 1, bias=False)
        fused.weight = mx.concatenate([layer.weight for layer in layers], axis=0)
        return [fused]
    quantised = [layer for layer in layers if isinstance(layer, nn.QuantizedLinear)]
    if len(quantised) != len(layers) or not isinstance(first, nn.QuantizedLinear):
        return list(layers)
    kind = (first.group_size, first.bits, first.mode)
    if any((layer.group_size, layer.bits, layer.mode) != kind for layer in quantised):
        return list(layers)
    fused = nn.QuantizedLinear(
        first.group_size, first.group_size, bias=False, group_size=kind[0], bits=kind[1], mode=kind[2]
    )
    for name in ("weight", "scales", "biases"):
        if name in first:
            fused[name] = mx.concatenate([layer[name] for layer in quantised], axis=0)
        elif name in fused:
            fused.pop(name)
    return [fused]
