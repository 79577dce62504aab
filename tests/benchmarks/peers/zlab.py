"""z-lab's own MLX implementation of DFlash: one request at a time."""

from typing import Any
from unittest.mock import patch

import mlx.core as mx

from dflash_core.checkpoints import load_target
from dflash_core.request import RowRequest
from dflash_core.text import Tokenizer
from tests.benchmarks.peers.setting import Answers, Play, Setting


def z_lab(setting: Setting) -> Play:
    """``stream_generate``, request after request. Raises ImportError where it is not installed."""
    from dflash import model_mlx as peer  # pyright: ignore[reportMissingImports]

    # It patches layers in place, so it has a model of its own; and it loads drafters from the hub alone.
    model = load_target(setting.target).model
    with patch.object(peer, "snapshot_download", lambda path, **_: path):
        draft = peer.load_draft(str(setting.drafter))
    draft.set_dtype(setting.loaded.dtype)
    own = Tokenizer.load(setting.target)

    def play() -> Answers:
        answers: Answers = []
        for request in setting.requests:
            tokens: list[int] = []
            for response in peer.stream_generate(
                model, draft, wrapped(request), mx.array(request.tokens), max_tokens=request.max_tokens
            ):
                tokens.extend(response.tokens)
            answers.append(tuple(tokens))
        return answers

    def wrapped(request: RowRequest) -> Any:
        from mlx_lm.tokenizer_utils import TokenizerWrapper

        stops = request.stop_token_ids or own.eos_token_ids
        return TokenizerWrapper(setting.transformers_tokenizer, eos_token_ids=list(stops))

    return play
