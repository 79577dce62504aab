"""The parity gate's cases on the embedded pair: precisions, greedy and seeded, every width and row count.

``COVER`` is what the test suite plays; ``PRODUCT`` is everything (tests/benchmarks/parity_product.py).
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import mlx.core as mx

from deployments.parity import ParityOptions, Trial, attempt, say_alone
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import RowId, RowRequest, Sampling
from dflash_core.text import Tokenizer
from tests.core.tiny_checkpoints import quantize_target

Precision = Literal["float32", "bfloat16", "4-bit"]
Manner = Literal["greedy", "seeded"]

PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32", "4-bit")  # the slowest gets the smallest blocks
MANNERS: tuple[Manner, ...] = ("greedy", "seeded")
WIDTHS = (1, 2, 4, 8, 16)
ROWS = (1, 2, 4, 8)
LONG = 132  # tokens: kernels may part beyond 128
SHORT = 10
QUESTIONS = (
    "Write a short story about a fox and a lantern.",
    "How do I write a Python function that merges two dictionaries?",
    "Where is Haiti?",
    "What is 48 - 10?",
    "What is the capital of France?",
    'Extract the name and age as JSON: "Ana is 31 years old."',
    "Write a SQL query that counts the orders of each customer.",
    'Define "southwest".',
)


@dataclass(frozen=True)
class Case:
    """One run of the gate."""

    precision: Precision
    manner: Manner
    width: int
    rows: int
    is_short: bool = False  # no long row

    def __str__(self) -> str:
        return f"{self.precision}-{self.manner}-w{self.width}-b{self.rows}"

    @property
    def num_long(self) -> int:
        """Rows that walk past 128 tokens; the others end early, so that windows also shrink."""
        if self.width < 4 or self.is_short:
            return 0  # as many rounds as tokens, and nothing that a wide block would not meet
        if self.precision == "float32":
            return 2 if self.manner == "greedy" else 1
        return 1 if self.manner == "greedy" and self.rows <= 4 else 0

    @property
    def short(self) -> int:
        """Tokens of the first short row; each further one says one more.

        Four prompts are read at once: the first rows of eight must outlive a round of a whole block.
        """
        return max(SHORT, self.width + 4) if self.rows == 8 else SHORT


PRODUCT = tuple(Case(*values) for values in product(PRECISIONS, MANNERS, WIDTHS, ROWS))

# All 20 pairs of a width and a row count; precision and manner go round the diagonals, so that every pair of
# two settings occurs (test_parity_cover.py counts them).
COVER = tuple(
    Case(PRECISIONS[(i + j) % 3], MANNERS[(i + j) % 2], width, rows)
    for i, width in enumerate(WIDTHS)
    for j, rows in enumerate(ROWS)
)


@cache
def lane(precision: Precision) -> LoadedLane:
    """The embedded pair; its target in 4 bits under activations as the loader chooses them."""
    if precision == "float32":
        return load_lane(TARGET, DRAFTER)
    if precision == "bfloat16":
        return load_lane(TARGET, DRAFTER, dtype=mx.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        return load_lane(quantize_target(TARGET, Path(folder)), DRAFTER, packed=True)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Chats of the pair's domain."""
    tokenizer = Tokenizer.load(TARGET)
    return tuple(tuple(tokenizer.apply_chat([{"role": "user", "content": q}])) for q in QUESTIONS)


def requests(case: Case, short: int | None = None) -> list[RowRequest]:
    """The rows of a case; they end by their budgets alone, which differ."""
    temperature = 0.0 if case.manner == "greedy" else 0.8
    return [
        RowRequest(
            RowId(f"q{i}"),
            tokens,
            LONG + i if i < case.num_long else (short or case.short) + i,
            Sampling(temperature=temperature, seed=100 + i),
        )
        for i, tokens in enumerate(prompts()[: case.rows])
    ]


_SPOKEN: dict[tuple[Precision, Manner, RowId], tuple[int, ...]] = {}


def alone(case: Case, wanted: list[RowRequest]) -> Mapping[RowId, tuple[int, ...]]:
    """What the rows say one by one, one token at a time; a longer answer begins with the shorter one."""
    for request in wanted:
        key = case.precision, case.manner, request.row_id
        if len(_SPOKEN.get(key, ())) < request.max_tokens:
            _SPOKEN[key] = say_alone(lane(case.precision), [request])[request.row_id]
    return {r.row_id: _SPOKEN[case.precision, case.manner, r.row_id][: r.max_tokens] for r in wanted}


def play(case: Case, short: int | None = None) -> Trial:
    """Play a case."""
    rows = requests(case, short)
    options = ParityOptions(rows=case.rows, width=case.width)
    return attempt(lane(case.precision), rows, alone(case, rows), options)
