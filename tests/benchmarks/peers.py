"""mlx-lm beside us, in the same process and run: one by one, its BatchGenerator, then our arms.

    python tests/benchmarks/peers.py --prompts FILE --limit 32 --rows 4 --repeat 3 [--device cpu]

Greedy, the embedded pair (or --target/--drafter), arms interleaved, first repetition not counted. Prints
tokens per second (min, median, max) and whether every answer's token ids equal mlx-lm's one by one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from deployments.bench import machine
from deployments.prompts import read_prompts
from dflash_core.acceptance import Acceptance
from dflash_core.calibration import measure_costs
from dflash_core.checkpoints import load_target, resolve_drafter, resolve_target
from dflash_core.loading import load_lane
from dflash_core.request import RowRequest, WindowId
from dflash_core.text import Tokenizer
from dflash_core.width import AutoWidth, FixedWidth, WidthPolicy
from dflash_core.window import Window, WindowPolicy
from dflash_core.workload import play_all

Answers = list[tuple[int, ...]]
Arm = Callable[[], Answers]


def one_by_one(model: Any, requests: list[RowRequest]) -> Answers:
    """mlx-lm's generate_step, request after request."""
    answers: Answers = []
    for request in requests:
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(request.tokens), model, max_tokens=request.max_tokens):
            tokens.append(int(token))
            if token in request.stop_token_ids:
                break
        answers.append(tuple(tokens))
    return answers


def batch_generator(model: Any, requests: list[RowRequest], rows: int) -> Answers:
    """mlx-lm's continuous batching with at most ``rows`` rows."""
    stops = [[token] for token in sorted(requests[0].stop_token_ids)]
    generator = BatchGenerator(
        model, stop_tokens=stops, completion_batch_size=rows, prefill_batch_size=min(rows, 8)
    )
    uids = generator.insert([list(r.tokens) for r in requests], [r.max_tokens for r in requests])
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(int(response.token))
    generator.close()
    return [tuple(tokens[uid]) for uid in uids]


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--device", choices=["cpu", "gpu"])
    options = parser.parse_args()
    if options.device is not None:
        mx.set_default_device(getattr(mx, options.device))
    target_path, drafter_path = resolve_target(options.target), resolve_drafter(options.drafter)
    requests = read_prompts(options.prompts, Tokenizer.load(target_path), limit=options.limit)
    model = load_target(target_path).model
    lane = load_lane(target_path, drafter_path)
    costs = measure_costs(lane.target, lane.drafter, max_rows=options.rows, budget_s=240.0)
    print(json.dumps(machine()), costs.as_json())

    def ours(width: Callable[[], WidthPolicy]) -> Answers:
        policy = WindowPolicy(width=width(), max_rows=options.rows)
        played = play_all(Window(WindowId("peers"), lane.target, lane.drafter, policy), requests)
        return [played.tokens[request.row_id] for request in requests]

    block = lane.drafter.block_size
    arms: dict[str, Arm] = {
        "mlx-lm one by one": lambda: one_by_one(model, requests),
        f"mlx-lm BatchGenerator, {options.rows} rows": lambda: batch_generator(model, requests, options.rows),
        "classic": lambda: ours(lambda: FixedWidth(1)),
        f"per row, width {block}": lambda: ours(lambda: FixedWidth(block)),
        "per row, width auto": lambda: ours(lambda: AutoWidth(costs, Acceptance(block))),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    equal: dict[str, int] = {}
    reference: Answers = []
    for repetition in range(options.repeat + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            answers = arm()
            seconds = time.perf_counter() - began
            reference = reference or answers
            equal[name] = sum(a == b for a, b in zip(answers, reference, strict=True))
            if repetition > 0:
                rates[name].append(sum(map(len, answers)) / seconds)
            print(f"{repetition} {name}: {sum(map(len, answers)) / seconds:.0f} tok/s", file=sys.stderr)
    for name, values in rates.items():
        print(
            f"{name:32s} {min(values):7.0f} {statistics.median(values):7.0f} {max(values):7.0f} tok/s, "
            f"{equal[name]} of {len(requests)} equal"
        )


if __name__ == "__main__":
    assert dflash_core.blas.prepare() is not None
    main()
