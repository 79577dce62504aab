"""mlx-vlm's batched DFlash: drafts row by row, one verify for all rows, the uniform clamp; no joins.

Its ``BatchGenerator`` is driven as its server does it, greedy, with its own choice of block sizes: each
prompt comes with the features of ``get_input_embeddings``, waiting prompts are sorted by length, and a batch
ends with its longest answer before the next one starts.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.benchmarks.peers.setting import Answers, Play, Setting
from tests.benchmarks.peers.vision_copy import is_text_only, write_vision_copy


def batched_dflash(setting: Setting) -> Play:
    """``BatchGenerator`` with a drafter and ``rows`` rows. Raises ImportError where it is not installed."""
    from mlx_vlm.generate.ar import BatchGenerator  # pyright: ignore[reportMissingImports]
    from mlx_vlm.speculative.common import (  # pyright: ignore[reportMissingImports]
        speculative_stats_since,
        speculative_stats_snapshot,
    )
    from mlx_vlm.speculative.drafters import (  # pyright: ignore[reportMissingImports]
        load_drafter,
        validate_drafter_compatibility,
    )
    from mlx_vlm.utils import StoppingCriteria  # pyright: ignore[reportMissingImports]

    model = load_model(setting.target)
    drafter, kind = load_drafter(str(setting.drafter))
    validate_drafter_compatibility(model, drafter, kind)
    for part in (model, drafter):
        cast(part, setting.loaded.dtype)
    tokenizer = setting.transformers_tokenizer
    tokenizer.stopping_criteria = StoppingCriteria([], tokenizer)

    def play() -> Answers:
        tokenizer.stopping_criteria.eos_token_ids = []
        generator = BatchGenerator(
            model.language_model,
            tokenizer,
            stop_tokens=setting.stop_token_ids,
            completion_batch_size=setting.rows,
            prefill_batch_size=setting.rows,  # nothing joins later: fewer would be fewer rows
            draft_model=drafter,
            draft_kind=kind,
            greedy_sampling=True,
        )
        before = speculative_stats_snapshot(drafter)
        tokens: dict[int, list[int]] = {}
        for request in setting.requests:
            prompt = list(request.tokens)
            (uid,) = generator.insert([prompt], request.max_tokens, [features(prompt)])
            tokens[uid] = []
        while generator.has_work:
            for response in generator.next()[1]:
                if response.token is not None:
                    tokens[response.uid].append(int(response.token))
        generator.close()
        row_rounds, accepted, _ = speculative_stats_since(drafter, before)
        if row_rounds:
            kept = accepted / row_rounds
            print(f"mlx-vlm: {kept:.2f} drafts kept a row-round, {row_rounds} row-rounds", file=sys.stderr)
        return [tuple(answer) for answer in tokens.values()]

    def features(prompt: list[int]) -> dict[str, Any]:
        given = model.get_input_embeddings(mx.array([prompt])).to_dict()
        return {name: value for name, value in given.items() if value is not None}

    return play


def load_model(target: Path) -> Any:
    """The target in mlx-vlm's classes; a text-only one by way of a copy."""
    from mlx_vlm import utils  # pyright: ignore[reportMissingImports]

    if not is_text_only(target):
        return utils.load_model(target)
    with TemporaryDirectory(prefix="dflash-peers-") as folder:
        return utils.load_model(write_vision_copy(target, Path(folder)))


def cast(model: Any, dtype: mx.Dtype) -> None:
    """Give weights the dtype of the other arms; ``A_log`` is float32 in all of them."""
    parameters: Any = tree_flatten(model.parameters())
    floats = [
        (name, array.astype(mx.float32 if name.endswith("A_log") else dtype))
        for name, array in parameters
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    model.load_weights(floats, strict=False)
    mx.eval(model.parameters())
