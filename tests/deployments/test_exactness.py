"""Strict service over stub findings: it plays equal shapes alone, and without one it reads no drafter."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments import exactness, warm
from deployments.engine import LocalEngine, TargetParts
from deployments.exactness import find_out, judge
from deployments.exchange.messages import DraftCall, DraftReply
from deployments.lane import Lane
from deployments.measuring import Circumstances
from deployments.settings import Settings
from dflash_core import loading
from dflash_core.probe import Finding, Findings
from dflash_core.request import RowId, WindowId
from dflash_core.shapes import AnyShape, Shape
from dflash_core.window import Window
from tests.core.engine_fixtures import eager, tiny_lane, write_pair

WIDTHS = (1, 2, 4, 8, 16)
EQUAL = Finding("equal")
NEAR = Finding("near_tie", 0.01)
ALL: tuple[Shape, ...] = tuple((slots, width) for slots in (1, 2, 4) for width in WIDTHS)


def found(*equal: Shape) -> Findings:
    """A table of all shapes up to 4 rows, these ones equal."""
    return Findings({shape: EQUAL if shape in equal else NEAR for shape in ALL})


# The judgement


def test_without_strictness_every_shape_is_used_whatever_was_found() -> None:
    open_to_all = judge(found(), is_strict=False, max_rows=4, widest=16)
    assert isinstance(open_to_all.shapes, AnyShape)
    assert (open_to_all.max_rows, open_to_all.widest, open_to_all.is_declined) == (4, 16, False)
    assert open_to_all.as_json()["shapes"]["4x16"] == {"verdict": "near_tie", "gap": 0.01}


def test_strictness_keeps_to_the_equal_shapes() -> None:
    strict = judge(found((1, 1), (2, 1), (2, 4), (4, 8)), is_strict=True, max_rows=4, widest=16)
    assert (strict.max_rows, strict.widest, strict.is_declined) == (2, 4, False)  # (4, 1) is not equal
    assert not strict.shapes.allows(4, 8)
    assert strict.prefill_rows == 1
    assert strict.note == "strict leaves up to 2 rows together and blocks of up to 4"


def test_shapes_that_these_settings_never_use_do_not_count() -> None:
    """Findings are kept under other settings, too."""
    kept = judge(found((1, 1), (1, 8), (4, 1)), is_strict=True, max_rows=2, widest=4)
    assert (kept.max_rows, kept.widest, kept.is_declined) == (1, 1, True)


def test_strictness_without_an_equal_block_declines_and_says_what_is_left() -> None:
    one_row = judge(found((1, 1)), is_strict=True, max_rows=4, widest=16)
    assert (one_row.max_rows, one_row.widest, one_row.is_declined) == (1, 1, True)
    assert one_row.as_json()["note"].startswith("strict leaves one row at a time and classic rounds")
    rows = judge(found((1, 1), (2, 1), (4, 1)), is_strict=True, max_rows=3, widest=16)
    assert (rows.max_rows, rows.is_declined) == (3, True)


def test_what_was_never_probed_is_not_equal() -> None:
    unknown = judge(Findings(), is_strict=True, max_rows=16, widest=16)
    assert (unknown.max_rows, unknown.widest, unknown.is_declined) == (1, 1, True)


def test_a_service_without_a_drafter_declines_nothing() -> None:
    classic = judge(found((1, 1), (2, 1)), is_strict=True, max_rows=4, widest=1)
    assert (classic.max_rows, classic.is_declined) == (2, False)


# Findings from one start to the next


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes that were probed; the budget is how many."""
    tried: list[Shape] = []

    def probe(target: object, shapes: list[Shape], *, budget_s: float, known: Findings | None) -> Findings:
        table = dict(known.table) if known is not None else {}
        for shape in [s for s in shapes if s not in table][: int(budget_s)]:
            tried.append(shape)
            table[shape] = EQUAL
        return Findings(table)

    monkeypatch.setattr(exactness, "probe", probe)
    return tried


HERE = Circumstances("target", "", 0)


def test_findings_are_kept_by_model_machine_and_software(
    probed: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_lane().target

    def start(where: Circumstances = HERE, budget_s: float = 15) -> int:
        return len(find_out(target, ALL, where, tmp_path, budget_s).table)

    assert start(budget_s=4) == 4
    assert start() == len(ALL)
    assert probed == list(ALL)  # what the first start had no time for, and nothing twice
    start(Circumstances("another", "", 0))
    start(Circumstances("target", "", 0, threads=1))
    assert len(probed) == 3 * len(ALL)
    monkeypatch.setattr("deployments.measuring.mlx_version", lambda: "another")
    start()
    assert len(probed) == 4 * len(ALL)


# The service


class DeafLink:
    """Nobody may be called: a drafter replica under strictness loads at its first call."""

    def __init__(self) -> None:
        self.calls = 0

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        self.calls += 1
        raise ConnectionError

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        self.calls += 1
        raise ConnectionError

    async def close(self, window_id: WindowId) -> None:
        self.calls += 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every reading of a drafter's weights."""
    seen: list[Path] = []
    read = loading.load_drafter_weights

    def noted(path: Path, *rest: Any) -> Any:
        seen.append(path)
        return read(path, *rest)

    monkeypatch.setattr(loading, "load_drafter_weights", noted)
    return seen


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, "today")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def open_target(
    pair: tuple[Path, Path],
    loop: asyncio.AbstractEventLoop,
    findings: Findings,
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> tuple[TargetParts, DeafLink]:
    monkeypatch.setattr(warm, "find_out", lambda *_: findings)
    target, drafter = (str(path) for path in pair)
    given = {"max_rows": 4, "calibration_s": 0, **settings}
    link = DeafLink()
    with eager():
        parts = LocalEngine().open_target(
            Settings(target=target, drafter=drafter, feature_bytes=2**20, **given), link, loop
        )
    return parts, link


def window_of(lane: Lane) -> Window:
    window = lane._open_window(WindowId("w"))
    assert isinstance(window, Window)
    return window


def test_a_failing_verdict_reads_no_drafter_and_calls_none(
    pair: tuple[Path, Path],
    loop: asyncio.AbstractEventLoop,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, link = open_target(pair, loop, found((1, 1)), monkeypatch, strict=True)
    assert reads == []
    assert link.calls == 0
    assert parts.exchange is None
    assert parts.facts["width"] == "classic"
    assert parts.facts["exactness"]["max_rows"] == 1
    assert "no drafter is read" in parts.facts["exactness"]["note"]
    policy = window_of(parts.lane).policy
    assert (policy.max_rows, policy.prefill_rows) == (1, 1)


def test_a_passing_verdict_reads_the_drafter_once_and_pins_windows_to_equal_shapes(
    pair: tuple[Path, Path],
    loop: asyncio.AbstractEventLoop,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    equal = found((1, 1), (1, 8), (2, 1), (2, 4))
    parts, _ = open_target(pair, loop, equal, monkeypatch, strict=True)
    assert reads == [pair[1]]
    assert parts.exchange is not None
    assert parts.facts["width"] == "fixed 8"
    policy = window_of(parts.lane).policy
    assert (policy.max_rows, policy.shapes.slots_for(2)) == (2, 2)
    assert [policy.width.choose([None] * slots, 16) for slots in (1, 2)] == [8, 4]


def test_the_same_failing_verdict_without_strictness_reads_the_drafter(
    pair: tuple[Path, Path],
    loop: asyncio.AbstractEventLoop,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the test above."""
    parts, _ = open_target(pair, loop, found((1, 1)), monkeypatch)
    assert reads == [pair[1]]
    assert parts.exchange is not None
    assert window_of(parts.lane).policy.max_rows == 4


def test_a_strict_drafter_replica_loads_at_its_first_call(
    pair: tuple[Path, Path], reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.drafter import DrafterReplica

    monkeypatch.setattr(warm, "warm_drafter", lambda *_: None)
    target, drafter = (str(path) for path in pair)

    async def start(is_strict: bool) -> tuple[int, int]:
        reads.clear()
        replica = DrafterReplica.__new__(DrafterReplica)
        settings = Settings(target=target, drafter=drafter, max_rows=1, strict=is_strict)
        await replica.__init__(settings, LocalEngine())  # as Serve builds it
        assert (await replica.stats())["sessions"] == 0
        await replica.close(WindowId("w"))
        at_start = len(reads)
        assert await replica.lengths(WindowId("w")) == {}
        replica.__del__()
        return at_start, len(reads)

    assert asyncio.run(start(is_strict=True)) == (0, 1)
    assert asyncio.run(start(is_strict=False)) == (1, 1)
