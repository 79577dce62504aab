"""The keys a drafter's config may have. Any other is an error: it may change what the drafter computes."""

from typing import Final

from dflash_core.checkpoints.fields import Fields

_STRUCTURAL: Final = frozenset(
    {
        "architectures", "attention_bias", "block_size", "dflash_config", "final_logit_softcapping",
        "head_dim", "hidden_act", "hidden_size", "input_embedding_scale", "intermediate_size", "is_causal",
        "is_neox_style", "layer_types", "mask_token_id", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "num_target_layers", "output_multiplier", "rms_norm_eps",
        "rope_is_neox_style", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
        "target_layer_ids", "use_sliding_window", "vocab_size",
    }
)  # fmt: skip
_STRUCTURAL_NESTED: Final = frozenset(
    {
        "block_size", "causal", "final_logit_softcapping", "input_embedding_scale", "mask_token_id",
        "num_target_layers", "output_multiplier", "swa_window_size", "target_layer_ids", "use_swa",
    }
)  # fmt: skip
# Names, training settings and output switches: nothing here changes the forward pass.
_HARMLESS: Final = frozenset(
    {
        "_attn_implementation", "_name_or_path", "attention_dropout", "auto_map", "bos_token_id",
        "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task",
        "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "license",
        "mask_token", "max_window_layers", "model_type", "name_or_path", "output_attentions",
        "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id",
        "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip


def refuse_unknown_keys(top: Fields, nested: Fields) -> None:
    """Refuse the first key that is neither structural and known, nor known to be harmless.

    Raises:
        CheckpointError: names the key and its value.
    """
    for section, structural in ((top, _STRUCTURAL), (nested, _STRUCTURAL_NESTED)):
        for key in section:
            if key not in structural and key not in _HARMLESS:
                raise section.error(
                    key, "no such key: it is not known, and may change what the drafter computes"
                )
