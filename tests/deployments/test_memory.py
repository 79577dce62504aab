"""A replica refuses, with the sum, what cannot fit its machine, before it loads a weight."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core import blas  # before MLX

# isort: split
from deployments import memory
from deployments.engine import LocalEngine
from deployments.memory import Limit, Pair, read_pair, require_room
from deployments.settings import Settings
from dflash_core import loading
from dflash_core.errors import CheckpointError
from dflash_core.pair import DRAFTER, TARGET

blas.prepare()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return read_pair(TARGET, DRAFTER, rows=16)


def test_a_pair_that_fits_is_let_in(pair: Pair) -> None:
    require_room(pair, Limit(pair.need(1024).total, "test"))


def test_the_refusal_is_one_line_with_a_sum_that_adds_up(pair: Pair) -> None:
    need = pair.need(1024)
    with pytest.raises(CheckpointError) as caught:
        require_room(pair, Limit(need.total - 1, "what the test gives"))
    words = str(caught.value)
    assert "\n" not in words
    assert need.in_one_line() in words
    assert all(part.name in words for part in need.parts)
    assert "fewer max_rows" in words
    assert "what the test gives" in words


def test_weights_that_do_not_fit_ask_for_a_smaller_target(pair: Pair) -> None:
    with pytest.raises(CheckpointError, match="a smaller or a 4-bit target"):
        require_room(pair, Limit(2**20, "test"))


def test_each_replica_counts_only_its_own_part(pair: Pair) -> None:
    target = pair.need(1024, has_drafter=False)
    drafter = pair.need(1024, has_target=False)
    assert target.total + drafter.total == pair.need(1024).total
    require_room(pair, Limit(drafter.total, "test"), has_target=False)
    with pytest.raises(CheckpointError, match="target weights"):
        require_room(pair, Limit(drafter.total, "test"), has_drafter=False)


def open_target() -> object:
    loop = asyncio.new_event_loop()
    try:
        return LocalEngine().open_target(Settings(), None, loop)
    finally:
        loop.close()


def open_drafter() -> object:
    return LocalEngine().open_drafter(Settings())


@pytest.mark.parametrize("open_part", [open_target, open_drafter])
def test_a_replica_refuses_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, open_part: Callable[[], object]
) -> None:
    def load(*args: object, **options: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(memory, "find_limit", lambda: Limit(2**20, "test"))
    monkeypatch.setattr(loading, "build_target", load)
    monkeypatch.setattr(loading, "build_drafter", load)
    with pytest.raises(CheckpointError, match="not enough memory here"):
        open_part()


@pytest.mark.parametrize(
    ("most", "used", "cached", "room"),
    [("max", 100, 0, None), ("1000", 600, 100, 500), ("1000", 1200, 0, 0)],
)
def test_a_containers_limit_counts_and_its_page_cache_is_free(
    tmp_path: Path, most: str, used: int, cached: int, room: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    assert memory._control_group_room(tmp_path) == room
    assert memory._control_group_room(tmp_path / "none") is None
