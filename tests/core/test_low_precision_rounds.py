"""Ragged rounds in bfloat16 and over a target of 4 bits: rows together pass the gate against rows alone."""

from collections.abc import Iterator
from functools import cache
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.loading import LoadedLane
from dflash_core.parity import compare
from tests.core.engine_fixtures import (
    ListedWidths,
    RowState,
    alone,
    eager,
    finish,
    make_lane,
    opened,
    progress_of,
    prompt,
    row,
    scripted,
    state_alone,
    tokens_of,
)

Kind = Literal["bfloat16", "4-bit"]
REQUESTS = [row(f"r{n}", prompt(n, n), 24 + n) for n in (2, 9, 17, 30)]
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "4-bit"])


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@cache
def lane(kind: Kind) -> LoadedLane:
    return make_lane(mx.bfloat16) if kind == "bfloat16" else make_lane(mx.float32, quantize=4, packed=True)


def ragged(name: str, length: int) -> int:
    """Right drafts: none, some or all, in turn and out of step between rows."""
    return (0, 3, 15, 1)[(length + int(name[1:])) % 4]


@KINDS
def test_ragged_rounds_pass_the_gate_against_each_row_alone(kind: Kind) -> None:
    lane_ = lane(kind)
    drafter = scripted(lane_, REQUESTS, ragged)
    with opened(lane_, *REQUESTS, width=ListedWidths((8, 16, 4)), drafter=drafter) as window:
        reports = finish(window)
    said = tokens_of(reports)
    for request in REQUESTS:
        verdict = compare(lane_.target, request, alone(lane_, request), said[request.row_id])
        assert verdict.passes(1.0), verdict
        accepted = [p.accepted for p in progress_of(reports, request.row_id) if p.drafted]
        assert len(set(accepted)) > 1
        assert sum(accepted) > 0
    assert max(report.live_rows for report in reports) == 4


# Of the largest number in each part: bfloat16 has 8 bits, and a row's errors add up over its rounds.
TOLERANCE = {"bfloat16": 0.08, "4-bit": 1e-4}


@KINDS
def test_ragged_rounds_leave_states_near_those_of_rows_alone(kind: Kind) -> None:
    lane_ = lane(kind)
    with opened(lane_, *REQUESTS, width=8, drafter=scripted(lane_, REQUESTS, ragged)) as window:
        said = {r.row_id: list(r.tokens) for r in REQUESTS}
        while window.num_live < 4 or len(said[REQUESTS[0].row_id]) < 12:
            for progress in window.step().rows:
                said[progress.row_id] += progress.tokens
        for slot, live in enumerate(window.rows):
            if live is None:
                continue
            tokens = said[live.row_id][: window.caches.lengths[slot]]
            here, there = RowState(window.caches, slot), state_alone(lane_.target, tokens)
            assert here.length == there.length
            assert distance(here, there) < TOLERANCE[kind]


@KINDS
def test_a_token_less_in_the_state_would_be_seen(kind: Kind) -> None:
    """The control of the test above."""
    target = lane(kind).target
    tokens = list(prompt(3, 20))
    whole, short = state_alone(target, tokens), state_alone(target, [*tokens[:-2], *tokens[-1:]])
    short.parts = {name: short.parts[name] for name in ("states", "conv")}
    whole.parts = {name: whole.parts[name] for name in ("states", "conv")}
    assert distance(whole, short) > 3 * TOLERANCE[kind]


def distance(a: RowState, b: RowState) -> float:
    """Largest difference of any part, relative to the part's largest number."""
    gaps = []
    for name in a.parts:
        for x, y in zip(a.parts[name], b.parts[name], strict=True):
            wide, other = np.asarray(x, np.float64), np.asarray(y, np.float64)
            gaps.append(float(np.abs(wide - other).max() / max(np.abs(other).max(), 1e-9)))
    return max(gaps)
