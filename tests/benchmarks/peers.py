"""Peers beside us, in one process and run: mlx-lm, its BatchGenerator, z-lab's dflash, then our arms.

    python -m tests.benchmarks.peers --prompts FILE --limit 32 --rows 4 --repeat 3 [--arms batch,wide,auto]

Greedy, the embedded pair (or --target/--drafter), arms interleaved, first repetition not counted. Prints
tokens per second (min, median, max), the ratio to the first arm and whether every answer's token ids equal
that arm's. The arm ``zlab`` needs ``pip install --no-deps dflash==0.1.0``, whose requirements pin older
libraries than ours; without it the arm is left out, and that is said.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


def z_lab(target: Path, drafter: Path) -> Callable[[list[RowRequest]], Answers] | None:
    """z-lab's own MLX implementation, one request after another; None where it is not installed."""
    try:
        from dflash import model_mlx as peer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"zlab is left out: {error}", file=sys.stderr)
        return None
    # It patches layers in place, so it has a model of its own; and it loads drafters from the hub alone.
    model = load_target(target).model
    with patch.object(peer, "snapshot_download", lambda path, **_: path):
        draft = peer.load_draft(str(drafter))
    draft.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    own = Tokenizer.load(target)

    def play(requests: list[RowRequest]) -> Answers:
        answers: Answers = []
        for request in requests:
            tokens: list[int] = []
            for response in peer.stream_generate(
                model, draft, wrapped(request), mx.array(request.tokens), max_tokens=request.max_tokens
            ):
                tokens.extend(response.tokens)
            answers.append(tuple(tokens))
        return answers

    def wrapped(request: RowRequest) -> Any:
        from mlx_lm.tokenizer_utils import TokenizerWrapper
        from transformers import AutoTokenizer

        if not cached:
            cached.append(AutoTokenizer.from_pretrained(str(target)))
        return TokenizerWrapper(cached[0], eos_token_ids=list(request.stop_token_ids or own.eos_token_ids))

    cached: list[Any] = []
    return play


ARMS = ("one", "batch", "zlab", "classic", "wide", "auto")


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--device", choices=["cpu", "gpu"])
    options = parser.parse_args()
    if options.device is not None:
        mx.set_default_device(getattr(mx, options.device))
    names = options.arms.split(",")
    if unknown := set(names) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    print(json.dumps(machine()))
    compare(make_arms(names, options), options.repeat)


def make_arms(names: list[str], options: Any) -> dict[str, Arm]:
    """The arms asked for, in the order of ``ARMS``."""
    target_path, drafter_path = resolve_target(options.target), resolve_drafter(options.drafter)
    requests = read_prompts(options.prompts, Tokenizer.load(target_path), limit=options.limit)
    model = load_target(target_path).model
    lane = load_lane(target_path, drafter_path)
    block = lane.drafter.block_size

    def ours(width: Callable[[], WidthPolicy]) -> Arm:
        def play() -> Answers:
            policy = WindowPolicy(width=width(), max_rows=options.rows)
            played = play_all(Window(WindowId("peers"), lane.target, lane.drafter, policy), requests)
            return [played.tokens[request.row_id] for request in requests]

        return play

    arms: dict[str, Arm] = {}
    if "one" in names:
        arms["mlx-lm one by one"] = lambda: one_by_one(model, requests)
    if "batch" in names:
        arms[f"mlx-lm BatchGenerator, {options.rows} rows"] = lambda: batch_generator(
            model, requests, options.rows
        )
    if "zlab" in names and (peer := z_lab(target_path, drafter_path)) is not None:
        arms["z-lab dflash one by one"] = lambda: peer(requests)
    if "classic" in names:
        arms[f"classic, {options.rows} rows"] = ours(lambda: FixedWidth(1))
    if "wide" in names:
        arms[f"per row, {options.rows} rows, width {block}"] = ours(lambda: FixedWidth(block))
    if "auto" in names:
        costs = measure_costs(lane.target, lane.drafter, max_rows=options.rows, budget_s=240.0)
        print("ms per round:", {k: round(1e3 * v, 1) for k, v in costs.as_json()["rounds"].items()})
        arms[f"per row, {options.rows} rows, width auto"] = ours(lambda: AutoWidth(costs, Acceptance(block)))
    return arms


def compare(arms: dict[str, Arm], repeat: int) -> None:
    """Play the arms in turn and print a line for each."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    equal: dict[str, int] = {}
    reference: Answers = []
    for repetition in range(repeat + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            answers = arm()
            rate = sum(map(len, answers)) / (time.perf_counter() - began)
            reference = reference or answers
            equal[name] = sum(a == b for a, b in zip(answers, reference, strict=True))
            if repetition > 0:
                rates[name].append(rate)
            print(f"{repetition} {name}: {rate:.0f} tok/s", file=sys.stderr, flush=True)
    first = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        middle = statistics.median(values)
        print(
            f"{name:34s} {min(values):7.0f} {middle:7.0f} {max(values):7.0f} tok/s, {middle / first:5.2f}x, "
            f"{equal[name]} of {len(reference)} equal"
        )


if __name__ == "__main__":
    assert dflash_core.blas.prepare() is not None
    main()
