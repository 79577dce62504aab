"""Operations per compiled round: on a GPU each costs a launch, about 25 µs on CUDA, whatever the rows."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest

from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import Sampling
from dflash_core.sampling import pack


@cache
def lane() -> LoadedLane:
    return load_lane(TARGET, DRAFTER)


@cache
def operations(slots: int, width: int, temperature: float = 0.0) -> int:
    """Nodes of a verify's compiled graph, constants and broadcasts included; nothing is computed."""
    target = lane().target
    sampling = pack([Sampling(temperature=temperature)] * slots, target.vocab_size)
    run = mx.compile(target._make_verify(sampling.variant, "per_row"))
    arrays = target.new_caches(slots, 128).arrays
    lengths, budgets = mx.zeros((slots,), dtype=mx.int32), mx.ones((slots,), dtype=mx.int32)
    tokens = mx.zeros((slots, width), dtype=mx.int32)
    caches = (arrays.keys, arrays.values, arrays.states, arrays.conv)
    packed, features, keys, values, states, conv = run(tokens, lengths, budgets, sampling.as_lists(), *caches)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), packed, features, *keys, *values, states, conv)
        return file.read_text().count("shape=rectangle")


# The pair has 12 layers: about 100 operations a layer classic, 140 in a block. Counted: 1184 to 1651.
@pytest.mark.parametrize(
    ("slots", "width", "most"), [(1, 1, 1250), (4, 1, 1400), (1, 16, 1700), (4, 16, 1750)]
)
def test_a_round_has_a_bounded_number_of_operations(slots: int, width: int, most: int) -> None:
    assert 100 < operations(slots, width) <= most


def test_more_rows_are_no_more_operations() -> None:
    assert operations(16, 16) == operations(4, 16)


def test_a_wider_block_is_not_a_loop_over_its_tokens() -> None:
    """The closed form inverts a block by halves: from 8 tokens to 16 a few operations a layer."""
    assert operations(4, 16) - operations(4, 8) < 12 * len(lane().target.network.layers)


def test_sampling_adds_operations_once_not_per_row_or_token() -> None:
    extra = [operations(s, w, 1.0) - operations(s, w) for s, w in ((1, 1), (4, 16))]
    assert extra[0] > 0
    assert extra[1] <= extra[0] + 10
