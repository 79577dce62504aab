"""The shapes that rounds may use, and that windows and widths keep to them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.acceptance import Acceptance
from dflash_core.costs import RoundCosts
from dflash_core.request import RowId
from dflash_core.row_cache import bucket_rows
from dflash_core.shapes import AnyShape, OnlyShapes
from dflash_core.target import Target
from dflash_core.width import AutoWidth, FixedWidth
from tests.core.engine_fixtures import (
    alone,
    eager,
    finish,
    opened,
    play,
    prompt,
    row,
    scripted,
    tiny_lane,
    tokens_of,
)

WIDTHS = (1, 2, 4, 8, 16)
pairs = st.frozensets(st.tuples(st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from(WIDTHS)))


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@given(pairs, st.integers(0, 16), st.integers(1, 20))
def test_whatever_is_allowed_a_classic_round_of_the_same_slots_is_too(
    given_pairs: frozenset[tuple[int, int]], num_rows: int, limit: int
) -> None:
    shapes = OnlyShapes(given_pairs)
    if num_rows > shapes.max_rows:
        with pytest.raises(ValueError, match="may hold"):
            shapes.slots_for(num_rows)
        return
    slots = shapes.slots_for(num_rows)
    width = shapes.widest(slots, limit)
    assert slots >= num_rows
    assert width <= min(limit, shapes.max_width)
    assert (slots, width) in shapes.pairs <= given_pairs | {(1, 1)}
    assert shapes.allows(slots, width)
    assert shapes.allows(slots, 1)


def test_without_a_list_every_width_plays_in_the_row_bucket() -> None:
    shapes = AnyShape()
    assert [shapes.slots_for(n) for n in (0, 1, 3, 9)] == [bucket_rows(n) for n in (0, 1, 3, 9)]
    assert shapes.widest(4, 13) == 13
    assert shapes.allows(3, 7)


def test_nothing_equal_leaves_one_row_and_one_token() -> None:
    shapes = OnlyShapes([(4, 16)])  # of no use: a round of four rows may turn out classic
    assert (shapes.max_rows, shapes.max_width, shapes.pairs) == (1, 1, {(1, 1)})


def test_widths_choose_among_the_allowed_ones() -> None:
    shapes = OnlyShapes([(1, 2), (1, 8), (2, 1), (2, 4)])
    flat = RoundCosts(dict.fromkeys([(1, w) for w in WIDTHS], 1.0))  # a wide block costs no more than a token
    for policy in (FixedWidth(16, shapes), AutoWidth(flat, Acceptance(16), shapes)):
        assert policy.choose([RowId("a")], 16) == 8
        assert policy.choose([RowId("a")], 4) == 2
        assert policy.choose([RowId("a"), None], 16) == 4


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Slots and width of each verify."""
    shapes: set[tuple[int, int]] = set()
    verify = Target.verify

    def noted(self, caches, block, drafts, accept):
        shapes.add((len(block.budgets), drafts.shape[1] + 1))
        return verify(self, caches, block, drafts, accept)

    monkeypatch.setattr(Target, "verify", noted)
    return shapes


@pytest.mark.parametrize(
    "allowed",
    [
        [(1, 4), (2, 1), (4, 1), (4, 8)],
        [(1, 4), (4, 1), (4, 2)],  # two rows play in four slots
        [],
    ],
)
def test_a_window_plays_nothing_but_allowed_shapes(
    verified: set[tuple[int, int]], allowed: list[tuple[int, int]]
) -> None:
    lane, shapes = tiny_lane(), OnlyShapes(allowed)
    requests = [row(f"r{n}", prompt(n, n), 3 + 2 * n) for n in (2, 5, 9, 12)]
    said = {r.row_id: alone(lane, r) for r in requests}
    drafter = scripted(lane, requests, 3)
    verified.clear()
    policy = {"shapes": shapes, "max_rows": shapes.max_rows, "prefill_rows": 1}
    with opened(lane, *requests, width=FixedWidth(16, shapes), drafter=drafter, **policy) as window:
        assert tokens_of(finish(window)) == said
    assert verified <= shapes.pairs
    if allowed:
        assert len({slots for slots, _ in verified}) > 1
        assert len({width for _, width in verified}) > 1


def test_without_the_policy_the_same_rows_play_other_shapes(verified: set[tuple[int, int]]) -> None:
    """The control of the test above."""
    requests = [row(f"r{n}", prompt(n, n), 3 + 2 * n) for n in (2, 5, 9, 12)]
    play(tiny_lane(), *requests, width=16)
    assert not verified <= OnlyShapes([(1, 4), (4, 1), (4, 2)]).pairs
