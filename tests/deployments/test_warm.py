"""What a target plays before it is ready: every shape that a service meets, as few rounds as that takes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deployments.warm import warm_target
from dflash_core.sampling import Variant
from dflash_core.target import Target
from tests.core.engine_fixtures import eager, tiny_lane
from tests.core.grammar_fixtures import grammar_lane

Shapes = list[tuple[int, int, str]]


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Slots, width and way to sample of each verify."""
    shapes: Shapes = []
    verify = Target.verify

    def noted(self, caches, block, drafts, accept):
        variant = block.sampling.variant
        if variant == Variant(variant.rule):  # rarer wishes have a test of their own
            shapes.append((len(block.budgets), drafts.shape[1] + 1, variant.rule))
        return verify(self, caches, block, drafts, accept)

    monkeypatch.setattr(Target, "verify", noted)
    return shapes


def test_rarer_wishes_are_played_alone_and_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, Variant]] = set()
    verify = Target.verify

    def noted(self, caches, block, drafts, accept):
        seen.add((len(block.budgets), block.sampling.variant))
        return verify(self, caches, block, drafts, accept)

    monkeypatch.setattr(Target, "verify", noted)
    warm_target(grammar_lane().target, 4, 8)
    biased, penalised = Variant(is_biased=True), Variant(is_penalised=True)
    everything = Variant("truncated", is_biased=True, is_penalised=True)
    wanted = (biased, penalised, replace(biased, rule="sampled"), everything, Variant(num_top=5))
    wanted += (Variant(is_masked=True), Variant("sampled", is_masked=True))
    assert {(rows, variant) for rows in (1, 2) for variant in wanted} <= seen


@pytest.mark.parametrize("max_rows", [1, 3, 4])
def test_every_width_is_played_at_every_row_bucket(verified: Shapes, max_rows: int) -> None:
    warm_target(tiny_lane().target, max_rows, 8)
    buckets = [rows for rows in (1, 2, 4) if rows < 2 * max_rows]
    wanted = {(rows, width, "greedy") for rows in buckets for width in (1, 2, 4, 8)}
    ways = ("sampled", "truncated")
    wanted |= {(rows, width, way) for rows in buckets for width in (1, 8) for way in ways}
    assert set(verified) == wanted
    assert len(verified) < 3 * len(wanted)


def test_a_target_without_drafts_is_warmed_up_to_its_last_row(
    verified: Shapes,
) -> None:
    warm_target(tiny_lane().target, 4, 1)
    assert {shape[:2] for shape in verified} == {(1, 1), (2, 1), (4, 1)}
