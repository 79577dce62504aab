"""Text in and text out: prompts to token ids, token ids to streamed text. Imports no MLX.

messages ──parse──► chat template ──shield──► ids ··· engine ··· ids ──detokenise──► stops ──► text
"""

from dflash_core.text.detokenize import Detokenizer, detokenizer_for
from dflash_core.text.stops import StopMatcher, StopProgress
from dflash_core.text.stream import TextDelta, TextStream
from dflash_core.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "StopMatcher",
    "StopProgress",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "detokenizer_for",
]
