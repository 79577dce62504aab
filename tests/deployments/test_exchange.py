"""Target and drafter over the exchange, in one process: the same objects as on Ray, a plain link between."""

import asyncio
import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest

from deployments.exchange import remote
from deployments.exchange.ledger import MERGE_TOKENS, Ledger
from deployments.exchange.messages import DraftCall, Piece, RowFeatures
from deployments.exchange.patience import COMPILE_S, MIN_SAMPLES, Patience
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.sessions import Sessions
from deployments.exchange.transport import Transport, from_wire, to_wire
from dflash_core.request import RowId, WindowId
from tests.deployments.fake_engine import BLOCK, DIM, FakeDrafter, FakeWindow, script
from tests.deployments.local_link import LocalLink, W, play, row, settle, tokens
from tests.deployments.ray_client import wait_until


@pytest.fixture
def link() -> LocalLink:
    return LocalLink()


@pytest.fixture
def drafter(link: LocalLink, loop: asyncio.AbstractEventLoop) -> RemoteDrafter:
    return RemoteDrafter(link, loop, Transport("value"), "fake", BLOCK, Patience(1.0, 1.0))


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


@pytest.mark.parametrize("is_dead", [False, True])
def test_an_answered_call_is_let_go_at_once(drafter: RemoteDrafter, link: LocalLink, is_dead: bool) -> None:
    # Its features may lie in the object store, which must not wait for Python's cycle collector.
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r", 700))
    link.is_dead = is_dead
    gc.disable()
    try:
        play(window, 1)
        anchors = weakref.ref(link.calls.pop().anchors)
        link.is_dead = False
        settle(drafter, window)
        play(window, 1)
        wait_until(lambda: anchors() is None, 5.0)
    finally:
        gc.enable()


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


@pytest.mark.timeout(30)
def test_a_stalled_draft_is_abandoned_by_the_running_median_and_drafts_are_back_with_the_ping(
    link: LocalLink, loop: asyncio.AbstractEventLoop
) -> None:
    """Waiting for the cap would time this test out."""
    drafter = RemoteDrafter(link, loop, Transport("value"), "fake", BLOCK, Patience(cap_s=120.0))
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    known = MIN_SAMPLES + 1  # the first brought a prompt, and says nothing
    reports = play(window, known)
    link.held = asyncio.Event()
    reports += play(window, 4)
    assert len(link.calls) == known + 1
    assert drafter.state == "away"
    loop.call_soon_threadsafe(link.held.set)
    settle(drafter, window)
    assert drafter.state == "ok"
    reports += play(window, 1)
    assert [report.width for report in reports] == [BLOCK] * known + [1] * 4 + [BLOCK]
    assert drafter.transport.take_traffic().failures == 1
    prompt = row("r").tokens
    emitted = tokens(reports, "r")
    assert emitted == [script(prompt, len(prompt) + i) for i in range(len(emitted))]


def test_a_window_that_ends_waits_for_no_late_answer(
    drafter: RemoteDrafter, link: LocalLink, loop: asyncio.AbstractEventLoop
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    window.admit(row("r"))
    link.held = asyncio.Event()
    play(window, 1)
    late = drafter._windows[W].late
    assert late is not None
    assert not late.done()
    window.close()
    assert late.cancelled()


# How long a draft is waited for

SHAPE = (4, 16)


def after(*seconds: float) -> Patience:
    patience = Patience(cap_s=2.0)
    for took in seconds:
        patience.observe(SHAPE, 20, took)
    return patience


@pytest.mark.parametrize(
    ("took", "limit"),
    [
        ([], 2.0),
        ([0.1] * (MIN_SAMPLES - 1), 2.0),
        ([0.1] * MIN_SAMPLES, 0.3),
        ([30.0, 0.1, 0.1, 0.1, 0.1], 0.3),  # the first one compiled
        ([0.002] * MIN_SAMPLES, 0.05),
        ([1.5] * MIN_SAMPLES, 2.0),
        ([0.1] * 15 + [0.4] * 7, 0.3),
        ([0.1] * 15 + [0.4] * 8, 1.2),  # it has become slower for good
    ],
)
def test_a_draft_may_take_three_times_its_running_median(took: list[float], limit: float) -> None:
    assert after(*took).limit_s(SHAPE, 0) == pytest.approx(limit)


def test_each_shape_has_a_median_of_its_own() -> None:
    patience = after(*[0.1] * MIN_SAMPLES)
    for _ in range(MIN_SAMPLES):
        patience.observe((1, 16), 1, 0.03)
    assert patience.limit_s(SHAPE, 0) == pytest.approx(0.3)
    assert patience.limit_s((1, 16), 0) == pytest.approx(0.09)


def test_a_shape_without_a_median_waits_as_long_as_the_slowest_that_is_no_smaller() -> None:
    patience = after(*[0.3] * MIN_SAMPLES)
    assert patience.limit_s((4, 2), 0) == pytest.approx(0.9)
    assert patience.limit_s((8, 16), 0) == 2.0  # nobody knows
    assert after(*[0.01] * MIN_SAMPLES).limit_s((4, 2), 0) == COMPILE_S  # it may have to be compiled


def test_a_prompt_has_time_of_its_own_and_says_nothing_of_other_drafts() -> None:
    patience = after(*[0.1] * MIN_SAMPLES)
    assert patience.limit_s(SHAPE, 64 + 500) == pytest.approx(0.3 + 0.5)
    assert patience.limit_s(SHAPE, 100_000) == 2.0  # no row waits for a book; it goes on without drafts
    for _ in range(30):
        patience.observe(SHAPE, 65, 9.0)
    assert patience.limit_s(SHAPE, 64) == pytest.approx(0.3)


def test_a_compile_may_take_its_time_while_shapes_are_measured() -> None:
    patience = after(*[0.1] * MIN_SAMPLES)
    with patience.waived(60.0):
        assert patience.limit_s(SHAPE, 0) == patience.limit_s((1, 2), 0) == 60.0
    assert patience.limit_s(SHAPE, 0) == pytest.approx(0.3)


def test_another_drafters_answer_counts_as_none(drafter: RemoteDrafter, link: LocalLink) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    link.sessions = Sessions(FakeDrafter(), "another", ttl_s=60.0)
    window.admit(row("r"))
    assert [report.width for report in play(window, 2)] == [1, 1]


def test_a_drafter_mismatch_is_told_once_and_asked_about_seldom(
    drafter: RemoteDrafter, link: LocalLink, caplog: pytest.LogCaptureFixture
) -> None:
    window = FakeWindow(W, drafter, 8, 0.0)
    link.sessions = Sessions(FakeDrafter(), "another", ttl_s=60.0)
    window.admit(row("r"))
    assert drafter.state == "ok"
    assert [report.width for report in play(window, 10)] == [1] * 10
    assert drafter.state == "drafter mismatch"
    assert len(link.calls) == 1
    assert drafter.transport.take_traffic().mismatches == 1
    second = FakeWindow(WindowId("second"), drafter, 8, 0.0)
    second.admit(row("r"))
    play(second, 3)
    assert sum("drafter mismatch" in record.message for record in caplog.records) == 1
    assert drafter.transport.take_traffic().mismatches == 1


def test_a_drafter_that_fits_again_ends_the_mismatch(
    drafter: RemoteDrafter, link: LocalLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MISMATCH_PAUSE_S", 0.0)
    window = FakeWindow(W, drafter, 8, 0.0)
    link.sessions = Sessions(FakeDrafter(), "another", ttl_s=60.0)
    window.admit(row("r"))
    play(window, 1)
    link.restart()
    settle(drafter, window)
    assert [report.width for report in play(window, 2)] == [BLOCK, BLOCK]
    assert drafter.state == "ok"


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
