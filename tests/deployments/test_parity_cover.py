"""The parity gate over precisions, sampling, widths and rows, with every control per precision.

Twenty of the 120 cases: each width with each row count, and every pair of any two settings. All of them:
``python tests/benchmarks/parity_product.py``.
"""

from itertools import combinations, product

import pytest

from deployments.parity import control, judge
from tests.deployments.parity_cases import (
    COVER,
    LONG,
    MANNERS,
    PRECISIONS,
    PRODUCT,
    ROWS,
    WIDTHS,
    Case,
    Precision,
    lane,
    play,
)


def test_the_cases_cover_every_pair_of_settings() -> None:
    axes = (PRECISIONS, MANNERS, WIDTHS, ROWS)
    values = [(c.precision, c.manner, c.width, c.rows) for c in COVER]
    for i, j in combinations(range(4), 2):
        assert {(v[i], v[j]) for v in values} == set(product(axes[i], axes[j]))
    assert set(COVER) <= set(PRODUCT)
    assert len(PRODUCT) == 120
    for precision in PRECISIONS:
        assert any(c.num_long for c in COVER if c.precision == precision)


@pytest.mark.parametrize("case", COVER, ids=str)
def test_rows_together_are_the_rows_alone(case: Case) -> None:
    trial = play(case)
    assert [check for check in judge(trial) if not check.is_good] == []
    lengths = [len(tokens) for tokens in trial.together.tokens.values()]
    assert lengths == [r.max_tokens for r in trial.requests]
    assert sum(length > 128 for length in lengths) == min(case.num_long, case.rows)
    assert sum(length >= LONG for length in lengths) == min(case.num_long, case.rows)
    if case.precision == "float32":  # near ties are rarer than these cases: expected plainly equal
        assert trial.differing == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_control_behaves(precision: Precision) -> None:
    # Half precision and 4 bits are slow on a CPU; two rows suffice for a fault in one, and sampled tokens
    # turn over sooner than greedy ones.
    width, rows, manner = (8, 4, "greedy") if precision == "float32" else (8, 2, "seeded")
    trial = play(Case(precision, manner, width, rows, is_short=True), short=32)
    checks = [*judge(trial), *control(lane(precision), trial)]
    assert [check for check in checks if not check.is_good] == []
    assert {check.name for check in checks} >= {
        "margin 0 rejects",
        "identical prompts",
        "broken commit fails",
    }
