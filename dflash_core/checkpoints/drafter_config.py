"""Reading a drafter's ``config.json``, in both public layouts.

Keys may lie in ``dflash_config`` or on top; the nested one wins. Nothing structural has a default.
"""

from collections.abc import Mapping
from typing import Final

from dflash_core.checkpoints.drafter_keys import refuse_unknown_keys
from dflash_core.checkpoints.drafter_kinds import refuse_other_kinds
from dflash_core.checkpoints.drafter_rope import parse_rope
from dflash_core.checkpoints.drafter_spec import DrafterLayerKind, DrafterSpec
from dflash_core.checkpoints.fields import Fields, holder

MAX_BLOCK: Final = 128
_WIDEST: Final = 2**20

_KINDS: Final[dict[str, DrafterLayerKind]] = {"full_attention": "full", "sliding_attention": "sliding"}


def parse_drafter_config(config: Mapping[str, object], source: str) -> DrafterSpec:
    """Parse a drafter's config; ``dtype`` and ``fingerprint`` stay empty: its weight files tell them.

    Raises:
        CheckpointError: another kind of drafter, an unknown key, or a value that is missing or impossible.
    """
    top = Fields(config, source)
    nested = top.section("dflash_config")
    refuse_other_kinds(top, nested)
    refuse_unknown_keys(top, nested)
    _check_fixed(top, nested)
    num_heads = top.integer("num_attention_heads", 1, 1024)
    vocab_size = top.integer("vocab_size", 2, 2**24)
    theta, scaling = parse_rope(top)
    kinds = _layer_kinds(top, nested)
    return DrafterSpec(
        num_layers=len(kinds),
        hidden_size=top.integer("hidden_size", 1, _WIDEST),
        intermediate_size=top.integer("intermediate_size", 1, _WIDEST),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(top, num_heads),
        head_dim=_head_dim(top),
        rms_norm_eps=top.number("rms_norm_eps", 1e-12, 1e-2),
        rope_theta=theta,
        rope_scaling=scaling,
        vocab_size=vocab_size,
        block_size=holder("block_size", nested, top).integer("block_size", 2, MAX_BLOCK),
        mask_token_id=_mask_token(top, nested, vocab_size),
        taps=_taps(top, nested),
        layer_kinds=kinds,
        is_causal=_causality(top, nested, kinds),
        sliding_window=_sliding_window(top, nested) if "sliding" in kinds else None,
        attention_bias=top.flag("attention_bias") or False,
        final_logit_softcap=_softcap(top, nested),
        embedding_scale=_optional_number(top, nested, "input_embedding_scale", 1e-6, 1e6),
        max_positions=top.integer("max_position_embeddings", 1, 2**30),
        dtype="",
        fingerprint="",
    )


def num_target_layers(config: Mapping[str, object], source: str) -> int | None:
    """Return how many layers the drafter says its target has, if it says; raises CheckpointError."""
    top = Fields(config, source)
    section = holder("num_target_layers", top.section("dflash_config"), top)
    return section.integer("num_target_layers", 1, 1024) if "num_target_layers" in section else None


def _check_fixed(top: Fields, nested: Fields) -> None:
    """Settings that have one supported value."""
    if (top.text("hidden_act") or "silu") != "silu":
        raise top.error("hidden_act", "silu")
    for key in ("rope_is_neox_style", "is_neox_style"):
        if top.flag(key) is False:
            raise top.error(key, "true: interleaved rope is not served")
    if _optional_number(top, nested, "output_multiplier", 1e-6, 1e6) != 1.0:
        raise holder("output_multiplier", nested, top).error("output_multiplier", "1.0")


def _kv_heads(top: Fields, num_heads: int) -> int:
    value = top.integer("num_key_value_heads", 1, num_heads)
    if num_heads % value:
        raise top.error("num_key_value_heads", f"a divisor of {num_heads} attention heads")
    return value


def _head_dim(top: Fields) -> int:
    value = top.integer("head_dim", 2, 4096)
    if value % 2:
        raise top.error("head_dim", "an even number: rope turns pairs")
    return value


def _mask_token(top: Fields, nested: Fields, vocab_size: int) -> int:
    return holder("mask_token_id", nested, top).integer("mask_token_id", 0, vocab_size - 1)


def _taps(top: Fields, nested: Fields) -> tuple[int, ...]:
    section = holder("target_layer_ids", nested, top)
    taps = section.integers("target_layer_ids")
    if any(tap < 0 for tap in taps) or list(taps) != sorted(set(taps)):
        raise section.error("target_layer_ids", "target layers from 0, ascending, each once")
    return taps


def _layer_kinds(top: Fields, nested: Fields) -> tuple[DrafterLayerKind, ...]:
    """No ``layer_types`` means all full, unless another key speaks of sliding: then it has to be said."""
    num_layers = top.integer("num_hidden_layers", 1, 256)
    names = top.texts("layer_types")
    has_sliding = names is not None and "sliding_attention" in names
    for section, key in ((top, "use_sliding_window"), (nested, "use_swa")):
        if section.flag(key) and not has_sliding and (key == "use_swa" or names is None):
            raise section.error(key, "layer_types that say which layers slide")
    if names is None:
        return ("full",) * num_layers
    if len(names) != num_layers or not set(names) <= set(_KINDS):
        raise top.error("layer_types", f"{num_layers} of {' or '.join(_KINDS)}")
    if has_sliding and top.flag("use_sliding_window") is False:
        raise top.error("use_sliding_window", "true, since layer_types has sliding_attention")
    return tuple(_KINDS[name] for name in names)


def _causality(top: Fields, nested: Fields, kinds: tuple[DrafterLayerKind, ...]) -> tuple[bool, ...]:
    """``is_causal`` on top, else ``dflash_config.causal``, else sliding layers are causal, full ones not."""
    for everywhere in (top.flag("is_causal"), nested.flag("causal")):
        if everywhere is not None:
            return (everywhere,) * len(kinds)
    return tuple(kind == "sliding" for kind in kinds)


def _sliding_window(top: Fields, nested: Fields) -> int:
    if "sliding_window" in top:
        return top.integer("sliding_window", 2, 2**30)
    key = "swa_window_size" if "swa_window_size" in nested else "sliding_window"
    return (nested if key == "swa_window_size" else top).integer(key, 2, 2**30)


def _softcap(top: Fields, nested: Fields) -> float | None:
    section = holder("final_logit_softcapping", nested, top)
    has_cap = "final_logit_softcapping" in section
    return section.number("final_logit_softcapping", 1e-3, 1e6) if has_cap else None


def _optional_number(top: Fields, nested: Fields, key: str, low: float, high: float) -> float:
    section = holder(key, nested, top)
    return section.number(key, low, high) if key in section else 1.0
