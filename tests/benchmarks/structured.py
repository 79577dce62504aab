"""Structured output with the embedded pair: whether every answer is right, and what a grammar costs others.

    python -m tests.benchmarks.structured schemas --count 200
    python -m tests.benchmarks.structured cost --repeat 5

``schemas`` asks for answers to random JSON schemas, eight in a window, half of them greedy and half hot, and
validates each. ``cost`` plays four rows, of which the fourth is free or has a grammar, arms interleaved after
one repetition that does not count, and tells what the three others got: the same tokens in both arms.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace

import dflash_core  # noqa: F401  before MLX

# isort: split
import jsonschema
from mlx import core as mx

from deployments.openai.grammar import grammar_of
from deployments.openai.parse import parse_document
from deployments.openai.schema import ChatRequest
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.text import Tokenizer
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from tests.deployments.random_schemas import Schema, random_schema

QUESTIONS = (
    "Describe a person as JSON.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "How much is 12 times 12?",
)
ENDLESS: Schema = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": {"type": "object"}, "minItems": 1000}},
    "required": ["people"],
    "additionalProperties": False,
}


def row(
    tokenizer: Tokenizer, name: str, question: str, max_tokens: int, schema: Schema | None, sampling: Sampling
) -> RowRequest:
    """A chat as a row, its grammar written as the server writes it."""
    fields: dict[str, object] = {"model": "demo", "messages": [{"role": "user", "content": question}]}
    if schema is not None:
        named = {"name": "answer", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    request = parse_document(fields, ChatRequest)
    ids = tuple(tokenizer.apply_chat([{"role": "user", "content": question}]))
    asked = grammar_of(request, ids, tokenizer)
    eos = tokenizer.eos_token_ids
    grammar = None if asked is None else asked[0]
    return RowRequest(RowId(name), ids, max_tokens, sampling, eos, grammar=grammar)


def window_of(lane: LoadedLane, width: int, rows: int) -> Window:
    """A window that plays one width."""
    return Window(WindowId("0"), lane.target, lane.drafter, WindowPolicy(FixedWidth(width), max_rows=rows))


def schemas(
    lane: LoadedLane, tokenizer: Tokenizer, count: int, first: int, seconds: float, width: int
) -> bool:
    """Answers to random schemas; whether all that were finished in time are valid."""
    asked = {str(seed): random_schema(seed) for seed in range(first, first + count)}
    window, began = window_of(lane, width, 8), time.perf_counter()
    for name, schema in asked.items():
        hot = Sampling(temperature=1.0 if int(name) % 2 else 0.0, seed=int(name))
        window.admit(row(tokenizer, name, QUESTIONS[0], 4000, schema, hot))
    said: dict[str, list[int]] = {name: [] for name in asked}
    ends: dict[str, str] = {}
    row_rounds = accepted = 0
    while window.has_work and time.perf_counter() - began < seconds:
        report = window.step()
        for progress in report.rows:
            said[progress.row_id] += progress.tokens
            accepted += progress.accepted
            if progress.finish is not None:
                ends[progress.row_id] = progress.error or progress.finish
        row_rounds += report.live_rows
    took, wrong = time.perf_counter() - began, []
    for name, schema in asked.items():
        if name not in ends:
            continue
        text = tokenizer.decode(said[name])
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((name, ends[name], text, error))
    for problem in wrong:
        print("wrong:", *problem)
    tokens = sum(map(len, said.values()))
    print(
        f"{len(ends) - len(wrong)} of {len(ends)} answers parse and validate ({count} asked for); "
        f"{tokens} tokens in {took:.1f} s ({tokens / took:.0f} tok/s), "
        f"{accepted / row_rounds:.2f} drafts accepted a row-round"
    )
    return not wrong


def cost(lane: LoadedLane, tokenizer: Tokenizer, repeat: int, width: int, rounds: int) -> None:
    """Tokens per second of three free rows beside a fourth that is free or has a grammar."""
    greedy, budget = Sampling(), (rounds + 4) * width
    free = [row(tokenizer, str(i), QUESTIONS[i], budget, None, greedy) for i in range(1, 4)]
    free = [replace(request, stop_token_ids=frozenset()) for request in free]
    fourth = {
        "free": replace(row(tokenizer, "0", QUESTIONS[0], budget, None, greedy), stop_token_ids=frozenset()),
        "grammar": row(tokenizer, "0", QUESTIONS[0], budget, ENDLESS, greedy),
    }
    rates: dict[str, list[float]] = {name: [] for name in fourth}
    answers: set[tuple[tuple[int, ...], ...]] = set()
    for repetition in range(repeat + 1):
        for arm, request in fourth.items():
            window = window_of(lane, width, 4)
            for member in (*free, request):
                window.admit(member)
            while not all(member.is_ready for member in window._queue):
                time.sleep(0.01)  # until the grammar is compiled: all four join together
            while window.num_live < 4:
                window.step()
            said: dict[str, tuple[int, ...]] = {}
            began = time.perf_counter()
            for _ in range(rounds):
                for progress in window.step().rows:
                    said[progress.row_id] = said.get(progress.row_id, ()) + progress.tokens
            seconds = time.perf_counter() - began
            assert window.num_live == 4, "a row ended before the measurement did"
            window.close()
            answers.add(tuple(said[name] for name in "123"))
            if repetition:
                rates[arm].append(sum(len(said[name]) for name in "123") / seconds)
    assert len(answers) == 1, "the free rows' answers depend on their company"
    for arm, measured in rates.items():
        least, middle, most = min(measured), statistics.median(measured), max(measured)
        print(
            f"width {width:2} beside one {arm:8} row: {least:6.1f} {middle:6.1f} {most:6.1f} tok/s of three"
        )
    share = statistics.median(rates["grammar"]) / statistics.median(rates["free"])
    print(f"width {width:2}: {share:.3f} of the rate beside a free row")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("schemas", "cost"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--seconds", type=float, default=1e9, help="play no longer; the rest goes unasked")
    parser.add_argument("--width", type=int, default=4, help="of schemas' rounds; most of their drafts fail")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16])
    given = parser.parse_args()
    lane, tokenizer = load_lane(TARGET, DRAFTER), Tokenizer.load(TARGET)
    print(f"device {mx.default_device()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if given.what == "schemas":
        raise SystemExit(not schemas(lane, tokenizer, given.count, given.first, given.seconds, given.width))
    for width in given.widths:
        cost(lane, tokenizer, given.repeat, width, given.rounds)


if __name__ == "__main__":
    main()
