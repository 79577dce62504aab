"""Target and drafter over the exchange, in one process: the same objects as on Ray, a plain link between."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import mlx.core as mx
import numpy as np
import pytest

from deployments.exchange.ledger import MERGE_TOKENS, Ledger
from deployments.exchange.messages import DraftCall, DraftReply, Piece, RowFeatures
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.sessions import Sessions
from deployments.exchange.transport import Transport, from_wire, to_wire
from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest, WindowId
from tests.deployments.fake_engine import BLOCK, DIM, FakeDrafter, FakeWindow, script

W = WindowId("w")


class LocalLink:
    """Calls go straight to the sessions; the tests break it in every way they like."""

    def __init__(self) -> None:
        self.sessions = Sessions(FakeDrafter(), "fake", ttl_s=60.0)
        self.calls: list[DraftCall] = []
        self.is_dead = False
        self.delay_s = 0.0

    def restart(self) -> None:
        self.sessions = Sessions(FakeDrafter(), "fake", ttl_s=60.0)
        self.is_dead = False

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        self.calls.append(call)
        self._check()
        reply = self.sessions.draft(call)
        await asyncio.sleep(self.delay_s)
        return reply

    async def lengths(self, window_id: WindowId) -> dict[RowId, int]:
        self._check()
        return self.sessions.lengths(window_id)

    async def close(self, window_id: WindowId) -> None:
        self.sessions.close(window_id)

    def _check(self) -> None:
        if self.is_dead:
            raise ConnectionError("no drafter")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def link() -> LocalLink:
    return LocalLink()


@pytest.fixture
def drafter(link: LocalLink, loop: asyncio.AbstractEventLoop) -> RemoteDrafter:
    return RemoteDrafter(link, loop, Transport("value"), "fake", BLOCK, timeout_s=0.3)


def settle(drafter: RemoteDrafter, window: FakeWindow) -> None:
    """Wait until a ping under way has its answer."""
    ping: Future | None = drafter._windows[W].ping
    if ping is not None:
        ping.result(5)


def row(name: str, length: int = 5, max_tokens: int = 400) -> RowRequest:
    return RowRequest(RowId(name), tuple(range(len(name), len(name) + length)), max_tokens)


def play(window: FakeWindow, rounds: int) -> list[RoundReport]:
    return [window.step() for _ in range(rounds)]


def tokens(reports: list[RoundReport], name: str) -> list[int]:
    return [t for report in reports for r in report.rows if r.row_id == name for t in r.tokens]


def test_every_draft_is_right_when_features_arrive_whole(drafter: RemoteDrafter) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("short", 5))
    window.admit(row("a-long-one", 900))
    reports = play(window, 20)
    assert all(r.accepted == BLOCK - 1 for report in reports for r in report.rows)


def test_a_round_sends_only_what_is_new(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r", 700))
    play(window, 3)
    assert [sum(f.count for f in call.features) for call in link.calls] == [700, BLOCK, BLOCK]


def test_rounds_are_classic_while_the_drafter_is_dead_and_speculate_again_after(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    before = play(window, 2)
    link.is_dead = True
    dead = play(window, 5)
    link.restart()
    settle(drafter, window)
    after = play(window, 2)
    assert [report.width for report in before + dead + after] == [BLOCK] * 2 + [1] * 5 + [BLOCK] * 2
    prompt = row("r").tokens
    emitted = tokens(before + dead + after, "r")
    assert emitted == [script(prompt, len(prompt) + i) for i in range(len(emitted))]


def test_a_dead_drafter_is_called_once_not_once_a_round(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    link.is_dead = True
    play(window, 10)
    assert len(link.calls) == 1


def test_a_restarted_drafter_is_noticed_by_lengths_and_fed_from_the_ledger(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r", 300))
    play(window, 2)
    link.restart()
    assert [report.width for report in play(window, 3)] == [1, BLOCK, BLOCK]


def test_a_late_answer_is_dropped_and_what_it_took_is_not_sent_twice(
    drafter: RemoteDrafter, link: LocalLink
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    play(window, 1)
    link.delay_s = 1.0
    assert play(window, 1)[0].width == 1
    link.delay_s = 0.0
    settle(drafter, window)
    assert play(window, 2)[-1].width == BLOCK
    assert sum(f.count for f in link.calls[-2].features) == 1  # the classic round's token alone


def test_another_drafters_answer_counts_as_none(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    link.sessions = Sessions(FakeDrafter(), "another", ttl_s=60.0)
    window.admit(row("r"))
    assert [report.width for report in play(window, 2)] == [1, 1]


def test_rows_that_leave_are_forgotten_on_both_sides(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    window.admit(row("stays"))
    play(window, 2)
    window.retire(RowId("r"))
    play(window, 1)
    assert set(link.sessions.lengths(W)) == {"stays"}
    window.retire(RowId("stays"))
    assert drafter._windows[W].ledger.num_pieces == 0


def test_idle_sessions_are_dropped_after_their_time() -> None:
    now = [0.0]
    sessions = Sessions(FakeDrafter(), "fake", ttl_s=60.0, clock=lambda: now[0])
    x = np.zeros((3, DIM), np.float32)
    x[:, 0] = range(3)
    features = RowFeatures(RowId("r"), 0, (Piece(0, 3, x),))
    sessions.draft(
        DraftCall(W, 1, "fake", "float32", 4 * DIM, (RowId("r"),), (features,), np.zeros(1, np.int32), BLOCK)
    )
    now[0] = 59.0
    sessions.sweep()
    assert sessions.num_sessions == 1
    now[0] = 61.0
    sessions.sweep()
    assert sessions.num_sessions == 0


def test_committed_pieces_are_merged() -> None:
    ledger = Ledger(Transport("value"))
    for start in range(0, 3 * MERGE_TOKENS, 4):
        ledger.append(RowId("r"), start, np.full((4, DIM), start, np.float32))
    assert ledger.num_pieces == 3
    sent = ledger.missing(RowId("r"))
    assert [p.start for p in sent.pieces] == [0, MERGE_TOKENS, 2 * MERGE_TOKENS]
    ledger.confirm(RowId("r"), MERGE_TOKENS + 10)
    sent = ledger.missing(RowId("r"))
    assert (sent.start, sent.count) == (MERGE_TOKENS + 10, 2 * MERGE_TOKENS - 10)
    assert np.asarray(sent.pieces[0].data)[0, 0] == MERGE_TOKENS + 8


def test_features_that_leave_a_gap_are_refused() -> None:
    ledger = Ledger(Transport("value"))
    ledger.append(RowId("r"), 0, np.zeros((4, DIM), np.float32))
    with pytest.raises(ValueError, match="start at 9, 4 are kept"):
        ledger.append(RowId("r"), 9, np.zeros((4, DIM), np.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_features_survive_the_wire_bit_by_bit(dtype: mx.Dtype) -> None:
    x = mx.random.normal((3, 5)).astype(dtype)
    back = from_wire(to_wire(x), str(dtype).removeprefix("mlx.core."))
    assert back.dtype == dtype
    assert mx.array_equal(back, x)
