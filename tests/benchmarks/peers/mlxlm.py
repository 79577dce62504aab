"""mlx-lm itself, without drafts: one request at a time, and its continuous batching."""

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from tests.benchmarks.peers.setting import Answers, Play, Setting


def one_by_one(setting: Setting) -> Play:
    """``generate_step``, request after request."""
    model = setting.loaded.model

    def play() -> Answers:
        answers: Answers = []
        for request in setting.requests:
            tokens: list[int] = []
            for token, _ in generate_step(mx.array(request.tokens), model, max_tokens=request.max_tokens):
                tokens.append(int(token))
                if token in request.stop_token_ids:
                    break
            answers.append(tuple(tokens))
        return answers

    return play


def batch_generator(setting: Setting) -> Play:
    """``BatchGenerator`` with at most ``rows`` rows."""
    model = setting.loaded.model

    def play() -> Answers:
        generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in setting.stop_token_ids],
            completion_batch_size=setting.rows,
            prefill_batch_size=min(setting.rows, 8),
        )
        uids = generator.insert(
            [list(r.tokens) for r in setting.requests], [r.max_tokens for r in setting.requests]
        )
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(int(response.token))
        generator.close()
        return [tuple(tokens[uid]) for uid in uids]

    return play
