"""The probe tells equal shapes, near ties and differences apart, and strict windows are bit for bit alone."""

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_core.models.target import BlockJournal, CacheArrays, TargetNetwork
from dflash_core.probe import PROMPT_TOKENS, Finding, Findings, mark, probe, shapes_to_probe
from dflash_core.target import Target
from tests.core.engine_fixtures import eager, tiny_lane

BLOCKS = [(1, 1), (1, 4), (2, 1), (4, 4)]


class Altered(TargetNetwork):
    """A network whose blocks of more than one token are wrong."""

    def __init__(self, network: TargetNetwork, logits: float = 0.0, commit: int = 0):
        self.__dict__.update(network.__dict__)
        self._fault, self._lost = logits, commit

    def logits(self, hidden: mx.array) -> mx.array:
        logits = super().logits(hidden)
        if hidden.shape[1] == 1:
            return logits
        return mx.concatenate([logits[..., :1] + self._fault, logits[..., 1:]], axis=-1)

    def commit(self, journal: BlockJournal, caches: CacheArrays, counts: mx.array) -> CacheArrays:
        is_block = journal.delta.decay.shape[-1] > 1
        return super().commit(journal, caches, counts - self._lost if is_block else counts)


def findings(target: Target, shapes: list[tuple[int, int]] = BLOCKS, **arguments: Any) -> Findings:
    with eager():
        return probe(target, shapes, budget_s=60.0, **arguments)


def test_the_probe_covers_every_width_and_row_bucket_that_rounds_use() -> None:
    assert set(shapes_to_probe(5, 16)) == {(b, w) for b in (1, 2, 4, 8) for w in (1, 2, 4, 8, 16)}
    assert set(shapes_to_probe(1, 10)) == {(1, w) for w in (1, 2, 4, 8, 10)}
    assert shapes_to_probe(4, 1) == [(1, 1), (2, 1), (4, 1)]


def test_the_probes_rows_stand_on_both_sides_of_128_tokens() -> None:
    """Some kernels change there: the longer row begins beyond, and no walk of the shorter reaches it."""
    assert min(PROMPT_TOKENS) + 64 < 128 < max(PROMPT_TOKENS)


def test_one_row_and_one_token_is_equal_and_blocks_are_near_ties() -> None:
    found = findings(tiny_lane(mx.float32).target).table
    assert found[1, 1] == Finding("equal")
    for shape in ((1, 4), (4, 4)):  # the closed form rounds otherwise than a step
        assert found[shape].verdict == "near_tie"
        assert found[shape].gap < 1e-3


def test_float64_differs_from_float32_by_the_digits_it_has() -> None:
    gaps = [findings(tiny_lane(d).target, [(4, 8)]).table[4, 8].gap for d in (mx.float64, mx.float32)]
    assert 0 < gaps[0] < 1e-9 < gaps[1] < 1e-3


@pytest.mark.parametrize(("fault", "verdict"), [(0.5, "near_tie"), (1.5, "different"), (np.nan, "different")])
def test_logits_that_are_off_are_judged_by_the_margin(fault: float, verdict: str) -> None:
    target = tiny_lane(mx.float32).target.with_network(lambda network: Altered(network, logits=fault))
    found = findings(target).table
    assert found[4, 4].verdict == verdict
    assert found[4, 4].gap == pytest.approx(np.finfo(np.float32).max if np.isnan(fault) else fault, abs=1e-3)
    assert found[1, 1].verdict == "equal"


def test_a_commit_that_loses_an_input_shows_though_the_logits_are_right() -> None:
    """The control: marks of the caches count, not the block's own logits alone."""
    with eager():
        right, wrong = (_bits_after(lost) for lost in (0, 1))
    assert right[0] == right[1]
    assert wrong[0] != wrong[1]


def _bits_after(lost: int) -> tuple[int, int]:
    """Marks of the state after two tokens, both times from the same caches; ``lost`` inputs in the second."""
    target = tiny_lane(mx.float32).target
    marks: list[int] = []
    for network in (target.network, Altered(target.network, commit=lost)):
        caches = target.new_caches(1, 1)
        caches.reserve(2)
        lengths = mx.array(caches.lengths)
        _, _, arrays, journal = network.verify(mx.array([[5, 6]]), lengths, caches.take())
        after = network.commit(journal, arrays, mx.array([2]))
        marks.append(int(np.array(mark(after, lengths, mx.array([2])))[0]))
    return marks[0], marks[1]


def test_a_mark_ignores_rejected_places_and_capacity_and_sees_every_bit() -> None:

    def arrays(capacity: int, garbage: float, bit: int = 0) -> CacheArrays:
        keys = np.full((1, 2, capacity, 4), garbage, np.float32)
        keys[:, :, :8] = np.random.default_rng(1).normal(size=(1, 2, 8, 4))
        keys.view(np.uint32)[0, 1, 6, 2] ^= bit
        state = mx.array(np.random.default_rng(2).normal(size=(2, 1, 2, 3, 3)).astype(np.float32))
        return CacheArrays([mx.array(keys)], [mx.array(keys)], state, mx.zeros((2, 1, 3, 4)))

    def marked(x: CacheArrays) -> int:
        return int(np.array(mark(x, mx.array([5]), mx.array([3])))[0])

    plain = marked(arrays(16, 0.0))
    assert marked(arrays(32, 7.0)) == plain
    assert marked(arrays(16, 0.0, bit=1)) != plain


def test_what_is_known_is_not_probed_again_and_no_shape_is_begun_after_the_budget() -> None:
    target = tiny_lane(mx.float32).target
    known = Findings({(1, 1): Finding("different", 9.0)})
    with eager():
        assert probe(target, BLOCKS, budget_s=0.0, known=known) == known
        assert probe(target, [(1, 1)], budget_s=60.0, known=known) == known
        brief = probe(target, BLOCKS, budget_s=1e-9)
    assert len(brief.table) <= 1


def test_findings_survive_their_json() -> None:
    found = Findings({(1, 1): Finding("equal"), (4, 16): Finding("near_tie", 0.25)})
    assert Findings.from_json(found.as_json()) == found
    assert found.equal == {(1, 1)}
    with pytest.raises(ValueError, match="no verdict"):
        Findings.from_json({"1x1": {"verdict": "perfect", "gap": 0.0}})


def test_a_shape_that_is_not_finite_is_different_in_words_that_json_has() -> None:
    target = tiny_lane(mx.float32).target.with_network(lambda network: Altered(network, logits=np.nan))
    found = findings(target, [(2, 4)])
    assert found.table[2, 4].verdict == "different"
    json.dumps(found.as_json(), allow_nan=False)
