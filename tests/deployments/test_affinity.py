"""What a router remembers of prompts it has sent somewhere."""

from collections.abc import Sequence

import pytest

from deployments import affinity
from deployments.affinity import BLOCK, LONGEST, MOST_LANES, Affinity, blocks_of


def prompt(*starts: int, short_of: int = 0) -> Sequence[int]:
    """The blocks of one block of tokens from each start; ``short_of`` so many at the end."""
    tokens = [token for start in starts for token in range(start, start + BLOCK)]
    return blocks_of(tokens[: len(tokens) - short_of])


def test_whole_blocks_count_from_the_beginning() -> None:
    seen = Affinity()
    seen.note("a", prompt(0, 100, 200))
    seen.note("b", prompt(0, 100, 300))
    assert seen.shared(prompt(0, 100, 200, 400)) == {"a": 3 * BLOCK, "b": 2 * BLOCK}
    assert seen.shared(prompt(0, 100, short_of=1)) == {"a": BLOCK, "b": BLOCK}
    assert seen.shared(prompt(100, 200)) == {}
    assert seen.shared(prompt(0, short_of=1)) == {}
    assert seen.shared(prompt(1, 100, 200)) == {}


def test_of_a_long_prompt_the_beginning_is_enough() -> None:
    seen = Affinity()
    seen.note("a", blocks_of(range(2 * LONGEST)))
    assert seen.shared(blocks_of(range(LONGEST + 1))) == {"a": LONGEST}
    assert len(seen) == LONGEST // BLOCK


def test_a_block_knows_the_lanes_that_read_it_last() -> None:
    seen = Affinity()
    for number in [*range(MOST_LANES + 2), 2]:
        seen.note(f"lane{number}", prompt(0))
    assert set(seen.shared(prompt(0))) == {f"lane{number}" for number in range(2, MOST_LANES + 2)}


def test_what_was_not_read_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MOST_BLOCKS", 4)
    seen = Affinity()
    seen.note("a", prompt(0, 100))
    seen.note("a", prompt(200, 300))
    seen.note("a", prompt(0, 100))
    seen.note("b", prompt(400))
    assert len(seen) == 4
    assert seen.shared(prompt(0, 100)) == {"a": 2 * BLOCK}
    assert seen.shared(prompt(200, 300)) == {}
    assert seen.shared(prompt(400)) == {"b": BLOCK}
