"""Features kept at the target are bounded: no token changes, and drafts go on while the drafter lives."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from deployments.exchange.absent import NoDrafter
from deployments.exchange.ledger import MERGE_TOKENS, Ledger
from deployments.exchange.patience import Patience
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.retention import Retention
from deployments.exchange.sessions import Sessions
from deployments.exchange.transport import Transport
from dflash_core.protocols import Drafter
from dflash_core.request import RowId, RowRequest
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from tests.core.engine_fixtures import eager, tiny_lane
from tests.deployments.fake_engine import BLOCK, DIM, FakeWindow, script
from tests.deployments.local_link import LocalLink, W, play, row, settle, tokens

TOKEN_BYTES = 4 * DIM
LIMIT = 400 * TOKEN_BYTES
A, B = RowId("a"), RowId("b")


@pytest.fixture
def link() -> LocalLink:
    return LocalLink()


@pytest.fixture
def drafter(link: LocalLink, loop: asyncio.AbstractEventLoop) -> RemoteDrafter:
    return RemoteDrafter(link, loop, Transport("value"), "fake", BLOCK, Patience(0.3, 0.3), LIMIT)


def test_rows_keep_speculating_within_the_bound(drafter: RemoteDrafter) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("old", 350, 4000))
    window.admit(row("young", 30, 4000))
    for _ in range(300):
        report = window.step()
        assert drafter.retention.num_bytes <= LIMIT
        assert all(r.accepted == BLOCK - 1 for r in report.rows)
    assert drafter.transport.take_traffic().contexts_lost == 0
    window.retire(RowId("old"))
    window.retire(RowId("young"))
    assert drafter.retention.num_bytes == 0


def test_a_row_that_begins_with_too_much_costs_no_other_row_its_drafts(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("old", 100, 4000))
    window.admit(row("young", 30, 4000))
    play(window, 4)
    window.admit(row("vast", 900, 4000))  # all of it still to be sent
    after = play(window, 6)
    assert drafter.retention.num_bytes <= LIMIT
    accepted: dict[str, int] = {r.row_id: r.accepted for r in after[-1].rows}
    assert (accepted["old"], accepted["young"], accepted["vast"]) == (BLOCK - 1, BLOCK - 1, 0)


def test_without_a_bound_all_is_kept(link: LocalLink, loop: asyncio.AbstractEventLoop) -> None:
    unbounded = RemoteDrafter(link, loop, Transport("value"), "fake", BLOCK, Patience(0.3, 0.3))
    window = FakeWindow(W, unbounded, 8, 0.0)
    window.admit(row("old", 350, 4000))
    play(window, 100)
    assert unbounded.retention.num_bytes > LIMIT
    window.close()
    assert unbounded.retention.num_bytes == 0


def test_a_lost_drafter_costs_only_the_trimmed_rows_their_drafts(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("old", 390, 4000))
    window.admit(row("young", 30, 4000))
    before = play(window, 8)
    link.restart()
    lost = play(window, 1)
    after = play(window, 8)
    assert drafter.transport.take_traffic().contexts_lost == 1
    assert {r.row_id: r.accepted for r in after[-1].rows} == {"old": 0, "young": BLOCK - 1}
    for name, length in (("old", 390), ("young", 30)):
        prompt = row(name, length).tokens
        emitted = tokens(before + lost + after, name)
        assert emitted == [script(prompt, length + i) for i in range(len(emitted))]


def test_rounds_are_classic_when_no_row_has_a_context(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("old", 500, 4000))
    reports = play(window, 5)
    assert [report.width for report in reports] == [1] * 5
    assert drafter.transport.take_traffic().contexts_lost == 1
    assert link.calls == []
    window.admit(row("new", 20, 4000))
    assert play(window, 1)[0].width == BLOCK


def test_a_drafter_that_stays_away_does_not_let_features_pile_up(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("old", 50, 4000))
    link.is_dead = True
    for _ in range(500):
        window.step()
        assert drafter.retention.num_bytes <= LIMIT
    link.restart()
    settle(drafter, window)
    assert play(window, 1)[0].width == 1
    assert drafter.transport.take_traffic().contexts_lost == 1


def test_what_the_drafter_holds_goes_first_and_the_oldest_rows_before_others() -> None:
    lost: list[None] = []
    retention = Retention(3 * MERGE_TOKENS * TOKEN_BYTES, lambda: lost.append(None))
    ledger = Ledger(Transport("value"), retention)
    chunk = np.zeros((MERGE_TOKENS, DIM), np.float32)
    ledger.append(A, 0, chunk)
    ledger.append(B, 0, chunk)
    ledger.append(B, MERGE_TOKENS, chunk)
    ledger.confirm(B, MERGE_TOKENS)
    ledger.append(A, MERGE_TOKENS, chunk)  # a is older, but only b's head is held elsewhere
    assert (ledger.can_draft(A), ledger.can_draft(B)) == (True, True)
    assert ledger.missing(A).count == 2 * MERGE_TOKENS
    assert (ledger.missing(B).start, ledger.missing(B).count) == (MERGE_TOKENS, MERGE_TOKENS)
    ledger.append(B, 2 * MERGE_TOKENS, chunk)
    assert (ledger.can_draft(A), ledger.can_draft(B)) == (False, True)
    assert len(lost) == 1


@pytest.fixture
def _eager() -> Iterator[None]:
    with eager():
        yield


@pytest.mark.usefixtures("_eager")
def test_real_rows_get_the_same_tokens_with_and_without_a_context(loop: asyncio.AbstractEventLoop) -> None:
    lane = tiny_lane()

    def play_rows(drafter: Drafter, break_after: int = 0) -> dict[str, list[int]]:
        policy = WindowPolicy(width=FixedWidth(4), max_rows=2)
        window = Window(W, lane.target, drafter, policy)
        for name, length in (("a", 40), ("b", 9)):
            window.admit(RowRequest(RowId(name), tuple((7 * i) % 128 for i in range(length)), 24))
        reports = []
        while window.has_work:
            if len(reports) == break_after:
                link.sessions = sessions()
            reports.append(window.step())
        window.close()
        return {name: tokens(reports, name) for name in ("a", "b")}

    def sessions() -> Sessions:
        lane.drafter.close(W)
        return Sessions(lane.drafter, "tiny")

    link = LocalLink()
    row_bytes = lane.target.feature_size * 8
    bounded = RemoteDrafter(link, loop, Transport("value"), "tiny", 4, Patience(30.0, 30.0), 50 * row_bytes)
    speculated = play_rows(bounded, break_after=6)
    assert bounded.transport.take_traffic().contexts_lost == 1
    assert speculated == play_rows(NoDrafter())
    assert bounded.retention.num_bytes == 0
