"""Relatives of DFlash that look alike and are not: refused by name, before anything else is read."""

import re
from collections.abc import Iterable
from typing import Final

from dflash_core.checkpoints.fields import Fields
from dflash_core.errors import CheckpointError

ARCHITECTURE: Final = "DFlashDraftModel"

_DFLASH2: Final = "a DFlash 2 drafter (block convolution, candidate selector)"
_DSPARK: Final = "a DSpark drafter (Markov head)"
_EXPORT: Final = "a speculators or MiMo export"

_ARCHITECTURES: Final = ((re.compile("DFlash2"), _DFLASH2), (re.compile("DSpark"), _DSPARK))
_KEYS: Final = (
    (re.compile(r"markov_|enable_confidence_head$|confidence_head|sample_from_anchor$"), _DSPARK),
    (re.compile(r"conv_kernel_size$|conv_group_size$|selector_"), _DFLASH2),
    (
        re.compile(
            r"eagle_aux_hidden_state_layer_ids$|attention_sink_bias$|draft_vocab_size$|speculators_"
            r"|transformer_layer_config$|mask_embedding$"
        ),
        _EXPORT,
    ),
)
_TENSORS: Final = (
    (re.compile(r"markov_|confidence_head"), _DSPARK),
    (re.compile(r"candidate_selector\.|_conv\.(base_kernel|kernel_projection)"), _DFLASH2),
    (re.compile(r"mask_embedding|attention_sink_bias|(^|\.)(d2t|t2d)$|verifier_"), _EXPORT),
)


def refuse_other_kinds(top: Fields, nested: Fields) -> None:
    """Refuse a config of another drafter kind by its name.

    Raises:
        CheckpointError: DFlash 2, DSpark, a speculators or MiMo export, or another architecture.
    """
    names = top.texts("architectures") or ()
    for name in names:
        for pattern, kind in _ARCHITECTURES:
            if pattern.search(name):
                raise top.error("architectures", f'["{ARCHITECTURE}"]; this is {kind}, which is not served')
    for section in (top, nested):
        for key in section:
            for pattern, kind in _KEYS:
                if pattern.match(key) and section.get(key) is not False:
                    raise section.error(key, f"no such key; this is {kind}, which is not served")
    if names != (ARCHITECTURE,):
        raise top.error("architectures", f'["{ARCHITECTURE}"]')


def refuse_other_tensors(names: Iterable[str], source: str) -> None:
    """Refuse weights of another drafter kind by its name.

    Raises:
        CheckpointError: a tensor that only DFlash 2, DSpark, speculators or MiMo drafters have.
    """
    for name in names:
        for pattern, kind in _TENSORS:
            if pattern.search(name):
                raise CheckpointError(
                    f'{source}: tensor "{name}" is found; expected a plain DFlash drafter, '
                    f"but this is {kind}, which is not served"
                )
