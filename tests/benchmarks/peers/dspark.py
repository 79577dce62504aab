"""mlx-dspark's batched baseline: static batches without drafts, which is all that it batches for hybrids.

Its batched speculation refuses targets with recurrent layers (``batch_spec_supported``). Requests are batched
in their order, as its server does: a batch ends with its longest answer, and rows that have ended keep
stepping until then.
"""

from typing import Any

from dflash_core.checkpoints import load_target
from tests.benchmarks.peers.setting import Answers, Play, Setting


def batched_baseline(setting: Setting) -> Play:
    """``batch_generate_baseline``, ``rows`` requests at a time.

    Raises ImportError where it is not installed, NotImplementedError where it does not batch the target.
    """
    from mlx_dspark.batch_engine import (  # pyright: ignore[reportMissingImports]
        batch_generate_baseline,
        batchable,
    )
    from mlx_dspark.target import Target  # pyright: ignore[reportMissingImports]

    # It marks the model's layers, so it has a model of its own.
    target = Target(load_target(setting.target).model, setting.transformers_tokenizer)
    if not batchable(target):
        raise NotImplementedError("mlx-dspark calls this target not batchable")
    tokenizer = StopsOnly(setting.transformers_tokenizer, setting.stop_token_ids)

    def play() -> Answers:
        answers: Answers = []
        for first in range(0, len(setting.requests), setting.rows):
            batch = setting.requests[first : first + setting.rows]
            results = batch_generate_baseline(
                target,
                tokenizer,
                [list(request.tokens) for request in batch],
                max_new_tokens=[request.max_tokens for request in batch],
            )
            answers += [tuple(result.token_ids) for result in results]
        return answers

    return play


class StopsOnly:
    """A tokenizer whose stop tokens are the requests' own: the peer would add markers of other families."""

    eos_token_id = None
    unk_token_id = None

    def __init__(self, tokenizer: Any, stop_token_ids: list[int]):
        self.eos_token_ids = stop_token_ids
        self.decode = tokenizer.decode

    def convert_tokens_to_ids(self, marker: str) -> None:
        """No marker by name."""
