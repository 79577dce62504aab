"""A replica refuses, with the sum, what cannot fit its machine, before it loads a weight."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import ray

from dflash_core import blas  # before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from deployments import memory, memory_limit
from deployments.engine import LocalEngine
from deployments.memory import Pair, read_pair, require_room
from deployments.memory_limit import Limit, find_limit
from deployments.settings import Settings
from dflash_core import loading
from dflash_core.checkpoints import load_target, packing
from dflash_core.errors import CheckpointError
from dflash_core.free_memory import container_room
from dflash_core.pair import DRAFTER, TARGET
from tests.core.tiny_checkpoints import quantize_target

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


def test_a_packed_target_counts_as_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantize_target(TARGET, tmp_path / "packed")
    unpacked = read_pair(path, None, rows=1).target_bytes
    monkeypatch.setattr(packing, "free_bytes", lambda: unpacked)
    packed = read_pair(path, None, rows=1).target_bytes
    for is_packed, counted in ((False, unpacked), (True, packed)):
        model = load_target(path, packed=is_packed).model
        assert sum(cast(mx.array, array).nbytes for _, array in tree_flatten(model.parameters())) == counted
    assert 3 * packed < unpacked


def test_each_replica_counts_only_its_own_part(pair: Pair) -> None:
    target = pair.need(1024, frozenset({"Target"}))
    drafter = pair.need(1024, frozenset({"Drafter"}))
    assert target.total + drafter.total == pair.need(1024).total
    require_room(pair, Limit(drafter.total, "test"), frozenset({"Drafter"}))
    with pytest.raises(CheckpointError, match="target weights"):
        require_room(pair, Limit(drafter.total, "test"), frozenset({"Target"}))


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
    assert container_room(tmp_path) == room
    assert container_room(tmp_path / "none") is None


GIB = 2**30
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Play a machine with a GPU, as MLX and psutil would tell of it."""

    def play(*, is_metal: bool, total: int, available: int, **facts: int) -> None:
        device = SimpleNamespace(type=mx.DeviceType.gpu)
        monkeypatch.setattr(mx, "default_device", lambda: device)
        monkeypatch.setattr(mx, "device_info", lambda: facts)
        monkeypatch.setattr(mx.metal, "is_available", lambda: is_metal)
        memory_here = SimpleNamespace(total=total, available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory_here)
        monkeypatch.setattr(memory_limit.sys, "platform", "darwin" if is_metal else "linux")

    return play


def mac(machine: Machine, *, wired: int, available: int) -> None:
    """A Mac of 32 GiB."""
    machine(is_metal=True, total=32 * GIB, available=available, max_recommended_working_set_size=wired)


def test_on_a_mac_both_what_metal_wires_and_what_others_leave_are_limits(machine: Machine) -> None:
    mac(machine, wired=24 * GIB, available=30 * GIB)
    assert (find_limit().bytes, find_limit().is_wired) == (24 * GIB, True)
    mac(machine, wired=24 * GIB, available=10 * GIB)  # another replica has loaded its weights
    assert (find_limit().bytes, find_limit().is_wired) == (10 * GIB, False)
    assert find_limit().source == "available of 32.00 GiB"


def test_on_a_gpu_of_its_own_only_its_memory_counts(machine: Machine) -> None:
    machine(is_metal=False, total=32 * GIB, available=GIB, free_memory=20 * GIB, total_memory=24 * GIB)
    assert find_limit() == Limit(20 * GIB, "the GPU's free memory")


def test_a_refusal_by_metals_limit_says_by_how_much_to_raise_it(pair: Pair, machine: Machine) -> None:
    mac(machine, wired=2**20, available=30 * GIB)
    with pytest.raises(CheckpointError) as caught:
        require_room(pair)
    most = int(0.85 * 32 * 2**10)
    assert f"sudo sysctl iogpu.wired_limit_mb={most}" in str(caught.value)
    assert "\n" not in str(caught.value)
    mac(machine, wired=24 * GIB, available=2**20)  # it is not Metal that is in the way
    with pytest.raises(CheckpointError) as caught:
        require_room(pair)
    assert "wired_limit" not in str(caught.value)
    assert memory_limit.wired_advice(30 * GIB, Limit(24 * GIB, "test", is_wired=True)) == ""  # no help


@pytest.mark.parametrize("open_part", [open_target, open_drafter])
def test_on_one_mac_target_and_drafter_must_fit_together(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, open_part: Callable[[], object]
) -> None:
    class LoadedError(Exception):
        pass

    def load(*args: object, **options: object) -> None:
        raise LoadedError

    monkeypatch.setattr(loading, "build_target", load)
    monkeypatch.setattr(loading, "build_drafter", load)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    mac(machine, wired=24 * GIB, available=30 * GIB)
    both = read_pair(TARGET, DRAFTER, rows=16).need(1024).total  # in the dtype of Metal
    mac(machine, wired=both - 1, available=30 * GIB)  # more than either needs
    with pytest.raises(CheckpointError, match=r"target weights .* drafter weights"):
        open_part()
    nodes.append({"Alive": True, "Resources": {"CPU": 8.0}})  # the other one may be there
    with pytest.raises(LoadedError):
        open_part()
