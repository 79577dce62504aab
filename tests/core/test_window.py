"""Windows: rows of any kind join, play and leave at round boundaries, each as if it were alone."""

from collections import Counter
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.accept import clamp, per_row, walk
from dflash_core.errors import ContextLengthExceeded, InvalidRequest
from dflash_core.events import RoundReport
from dflash_core.request import RowId, RowRequest
from tests.core.engine_fixtures import (
    VOCAB,
    WINDOW,
    ListedWidths,
    ScriptedDrafter,
    alone,
    eager,
    finish,
    local,
    make_lane,
    open_window,
    opened,
    progress_of,
    prompt,
    row,
    scripted,
    tiny_lane,
    tokens_of,
)

# Rows of every kind; Hypothesis picks among them, so that what each says alone is computed once.
POOL = (
    row("short", prompt(1, 1), 15),
    row("long", prompt(2, 70), 6),
    row("one token", prompt(3, 17), 1),
    row("sampled", prompt(4, 8), 22, temperature=0.9, seed=5),
    row("cut", prompt(5, 33), 12, temperature=1.1, top_k=12, top_p=0.9, seed=6),
    row("many", prompt(6, 16), 33),
    row("two", prompt(7, 40), 2),
    row("tail", prompt(8, 25), 18),
)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def spoken(requests: Sequence[RowRequest]) -> dict[str, tuple[int, ...]]:
    return {request.row_id: alone(tiny_lane(), request) for request in requests}


def with_stop(request: RowRequest, place: int) -> RowRequest:
    """The request with a stop token that its row says at ``place`` or before."""
    stop = alone(tiny_lane(), request)[place]
    return RowRequest(request.row_id, request.tokens, request.max_tokens, request.sampling, frozenset({stop}))


# Whole lives


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_rows_in_any_order_say_what_they_say_alone(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(POOL), min_size=1, unique=True), label="rows")
    stops = data.draw(st.lists(st.sampled_from((None, None, 0, 3)), min_size=8, max_size=8), label="stops")
    requests = [
        with_stop(r, stop) if stop is not None and stop < r.max_tokens else r
        for r, stop in zip(chosen, stops, strict=False)
    ]
    joins = data.draw(st.lists(st.integers(0, 12), min_size=8, max_size=8), label="joins at step")
    widths = data.draw(st.lists(st.sampled_from((1, 2, 4, 8, 16)), min_size=1, max_size=4), label="widths")
    rights = data.draw(st.lists(st.integers(0, 16), min_size=5, max_size=5), label="right drafts")
    early = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), label="drafts asked for early")
    max_rows = data.draw(st.sampled_from((1, 2, 3, 4, 8)), label="max rows")
    accept = data.draw(st.sampled_from(("per_row", "clamp")), label="accept")
    drafter = scripted(tiny_lane(), chosen, lambda name, length: rights[(length + len(name)) % 5])
    with opened(
        tiny_lane(),
        width=ListedWidths(widths),
        drafter=drafter,
        max_rows=max_rows,
        accept=accept,
        prefill_rows=3,
        prefill_chunk=32,
    ) as window:
        reports, step = [], 0
        pending = sorted(zip(joins, requests, strict=False), key=lambda pair: pair[0])
        while pending or window.has_work:
            if early[step % 3]:  # joins then come while the step is under way
                window.begin()
            while pending and pending[0][0] <= step:
                window.admit(pending.pop(0)[1])
            reports.append(window.step())
            assert window.num_live <= max_rows
            step += 1
            assert step < 300
    for request in requests:
        said = tokens_of(reports)[request.row_id]
        full = alone(tiny_lane(), next(r for r in chosen if r.row_id == request.row_id))
        ends = [i for i, token in enumerate(full) if token in request.stop_token_ids]
        assert said == (full[: ends[0] + 1] if ends else full)
        reasons = [p.finish for p in progress_of(reports, request.row_id)]
        assert reasons == [None] * (len(reasons) - 1) + ["stop" if ends else "length"]
    assert_accounts(reports, accept)


def assert_accounts(reports: Sequence[RoundReport], accept: str) -> None:
    """Every token is an accepted draft, a bonus, or a prompt's first; nothing is kept that was not walked."""
    seen: set[str] = set()
    for report in reports:
        counts = Counter(p.row_id for p in report.rows)
        assert set(counts.values()) <= {1}
        for p in report.rows:
            is_first = p.row_id not in seen
            seen.add(p.row_id)
            assert 0 <= p.accepted <= p.walked <= p.drafted < max(1, report.width)
            in_round = len(p.tokens) - is_first
            if p.finish == "stop":  # cut at a draft, at the bonus, or at the prompt's own token
                assert in_round in (p.accepted, p.accepted + 1)
            elif not (is_first and in_round == 0):  # its first round is still to come, or was not needed
                assert in_round == p.accepted + 1
            if p.finish is None and accept == "per_row":
                assert p.accepted == p.walked


def test_a_row_that_ends_where_a_step_begins_is_told_of_though_no_other_is_left() -> None:
    request = row("r", prompt(1, 4), 1)  # reading its prompt gives all that it may say
    with opened(tiny_lane(), request) as window:
        window.begin()
        assert window.num_rows == 0
        assert tokens_of(finish(window)) == {"r": alone(tiny_lane(), request)}


def test_who_leaves_while_a_step_is_under_way_is_gone_after_it() -> None:
    requests = [row(f"r{i}", prompt(i, 4 + i), 31) for i in range(3)]
    with opened(tiny_lane(), *requests) as window:
        for _ in range(3):
            window.step()
        window.begin()
        window.retire(RowId("r1"))
        assert [p.row_id for p in window.step().rows] == ["r0", "r1", "r2"]
        assert [p.row_id for p in window.step().rows] == ["r0", "r2"]
        said = tokens_of(finish(window))
    for name in ("r0", "r2"):
        full = alone(tiny_lane(), next(r for r in requests if r.row_id == name))
        assert said[RowId(name)] == full[-len(said[RowId(name)]) :]


def test_a_window_closed_while_a_step_is_under_way_leaves_no_context_behind() -> None:
    lane = tiny_lane()
    drafter = local(lane)
    with opened(lane, row("a", prompt(1, 9), 20), drafter=drafter) as window:
        window.step()
        window.begin()
        window.close()
    assert drafter.num_sessions == 0


def test_every_accept_is_committed_and_counted() -> None:
    """Figures of a plain run, added up: tokens = first tokens + accepted + one bonus per row-round."""
    requests = [row(f"r{i}", prompt(i, 4 + i), 31) for i in range(4)]
    drafter = scripted(tiny_lane(), requests, lambda name, _length: int(name[1:]))
    with opened(tiny_lane(), *requests, drafter=drafter) as window:
        reports = finish(window)
    for i, request in enumerate(requests):
        rounds = progress_of(reports, request.row_id)
        assert [p.accepted for p in rounds[:-1]] == [i] * (len(rounds) - 1)
        assert sum(len(p.tokens) for p in rounds) == 31
        assert len(rounds) == -(-30 // (i + 1))
    indices = [report.round_index for report in reports]
    assert indices == list(range(1, len(reports) + 1))


# Budgets and stops


def test_a_short_budget_does_not_narrow_its_neighbours_blocks() -> None:
    short, other = row("short", prompt(1, 5), 3), row("other", prompt(2, 9), 40)
    drafter = scripted(tiny_lane(), [short, other], 16)
    with opened(tiny_lane(), short, other, width=16, drafter=drafter) as window:
        first = window.step()
        assert first.width == 16
        of_short, of_other = progress_of([first], "short")[0], progress_of([first], "other")[0]
        assert of_short.finish == "length"
        assert of_short.tokens == alone(tiny_lane(), short)
        assert len(of_other.tokens) == 1 + 16
        finish(window)


def test_blocks_narrow_when_every_budget_is_short() -> None:
    requests = [row("a", prompt(1, 5), 4), row("b", prompt(2, 9), 3)]
    with opened(tiny_lane(), *requests, width=16, drafter=scripted(tiny_lane(), requests, 16)) as window:
        report = window.step()
    assert report.width == 4  # three tokens to come, in a power of two
    assert [p.finish for p in report.rows] == ["length", "length"]


def test_a_budget_of_one_is_the_prompts_own_token() -> None:
    request = row("one", prompt(3, 17), 1)
    with opened(tiny_lane(), request) as window:
        report = window.step()
        assert not window.has_work
    assert report.width == 0
    (progress,) = report.rows
    assert (progress.tokens, progress.finish) == (alone(tiny_lane(), request), "length")
    assert len(progress.tokens) == 1


@pytest.mark.parametrize("place", [0, 1, 4, 8, 9])
def test_a_stop_token_inside_an_accepted_block_ends_the_row_there(place: int) -> None:
    plain = row("r", prompt(9, 6), 30)
    said = alone(tiny_lane(), plain)
    request = with_stop(plain, place)
    end = next(i for i, token in enumerate(said) if token in request.stop_token_ids)
    beside = row("beside", prompt(2, 9), 30)
    drafter = scripted(tiny_lane(), [plain, beside], 16)
    with opened(tiny_lane(), request, beside, width=8, drafter=drafter) as window:
        reports = finish(window)
    assert tokens_of(reports) == {"r": said[: end + 1], "beside": alone(tiny_lane(), beside)}
    last = progress_of(reports, "r")[-1]
    assert last.finish == "stop"
    assert last.accepted <= len(last.tokens)


def test_a_stop_token_in_the_prompt_does_not_end_a_row() -> None:
    request = row("r", (*prompt(9, 6), 77), 8)
    assert 77 not in alone(tiny_lane(), request)
    with opened(tiny_lane(), row("r", request.tokens, 8, stop=[77])) as window:
        assert tokens_of(finish(window))["r"] == alone(tiny_lane(), request)


def test_a_finished_row_has_no_influence() -> None:
    """After one row's end the other's widths, drafts and tokens are those of a window where it never was."""
    short, other = row("short", prompt(1, 5), 5), row("other", prompt(2, 9), 40)

    def run(*requests: RowRequest) -> tuple[list[int], list[list[int]]]:
        drafter = scripted(tiny_lane(), [short, other], 3)
        with opened(tiny_lane(), *requests, drafter=drafter) as window:
            reports = finish(window)
        assert tokens_of(reports)["other"] == alone(tiny_lane(), other)
        places = [block.row_ids.index(other.row_id) for block, _ in drafter.calls]
        drafts = [own[place].tolist() for own, place in zip(drafter.own, places, strict=True)]
        return [report.width for report in reports], drafts

    assert run(short, other) == run(other)


# Accept policies


def test_walks_count_leading_matches() -> None:
    chosen = mx.array([[1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9]])
    drafts = mx.array([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 0]])
    assert walk(drafts, chosen).tolist() == [3, 1, 0, 2]
    assert walk(mx.zeros((4, 0), dtype=mx.int32), chosen[:, :1]).tolist() == [0, 0, 0, 0]


def test_policies_keep_what_they_say() -> None:
    walked, is_live = mx.array([3, 1, 0, 2]), mx.array([True, True, False, True])
    assert per_row(walked, is_live).tolist() == [3, 1, 0, 2]
    assert clamp(walked, is_live)[mx.array([0, 1, 3])].tolist() == [
        1,
        1,
        1,
    ]  # the idle slot's 0 does not count


def test_the_clamp_cuts_every_live_row_to_the_shortest() -> None:
    requests = [row(f"r{i}", prompt(i, 4 + i), 40) for i in (2, 5, 7)]
    drafter = scripted(tiny_lane(), requests, lambda name, _length: int(name[1:]))
    with opened(tiny_lane(), *requests, drafter=drafter, accept="clamp") as window:
        for report in (window.step(), window.step()):
            assert [p.accepted for p in report.rows] == [2, 2, 2]
            assert [p.walked for p in report.rows] == [2, 5, 7]
        reports = finish(window)
    assert {p.finish for p in reports[-1].rows} == {"length"}


# Membership


def test_slots_grow_with_joins_and_shrink_with_leaves() -> None:
    requests = [row(f"r{i}", prompt(i, 4 + i), 8 + 5 * i) for i in range(5)]
    drafter = scripted(tiny_lane(), requests, 0)
    sizes: list[int] = []
    with opened(tiny_lane(), *requests, drafter=drafter, prefill_rows=1) as window:
        reports: list[RoundReport] = []
        while window.has_work:
            reports.append(window.step())
            sizes.append(len(window.rows))
            assert window.caches.num_slots == len(window.rows)
            assert window.num_live <= len(window.rows)
    assert sizes[:5] == [1, 2, 4, 4, 8]
    assert {1, 2, 4} < set(sizes[5:])
    assert sizes[-1] == 1
    assert tokens_of(reports) == spoken(requests)


def test_slots_do_not_shrink_while_somebody_is_about_to_join() -> None:
    requests = [row("a", prompt(1, 3), 3), row("b", prompt(2, 4), 30), row("c", prompt(3, 5), 30)]
    with opened(tiny_lane(), *requests, drafter=scripted(tiny_lane(), requests, 0), max_rows=2) as window:
        reports = [window.step() for _ in range(3)]
        assert len(window.rows) == 2
        reports += finish(window)
    assert tokens_of(reports) == spoken(requests)


def test_a_retired_slot_is_refilled_from_the_queue() -> None:
    requests = [row(f"r{i}", prompt(i, 4 + i), 16) for i in range(3)]
    with opened(tiny_lane(), *requests, drafter=scripted(tiny_lane(), requests, 1), max_rows=2) as window:
        window.step()
        assert (window.num_live, window.num_rows, window.free_rows) == (2, 3, 0)
        window.retire(RowId("r0"))
        assert window.num_live == 1
        report = window.step()
        assert {p.row_id for p in report.rows} == {"r1", "r2"}
        assert window.num_live == 2


def test_rows_retire_in_every_state_and_leave_nothing() -> None:
    requests = [row(f"r{i}", prompt(i, 40), 24) for i in range(4)]
    drafter = scripted(tiny_lane(), requests, 1)
    with opened(
        tiny_lane(), *requests[:2], drafter=drafter, max_rows=3, prefill_rows=1, prefill_chunk=16
    ) as window:
        while window.num_live < 1:
            window.step()
        window.admit(requests[2])
        window.admit(requests[3])
        window.step()  # r1 is being read now, r2 and r3 wait
        assert (window.num_live, window.num_rows) == (1, 4)
        assert set(local(tiny_lane()).context_lengths(WINDOW)) == {"r0", "r1"}
        for gone in ("r3", "r1", "r0"):  # queued, prefilling, live
            window.retire(RowId(gone))
            window.retire(RowId(gone))  # unknown by now: ignored
            report = window.step()
            assert gone not in {p.row_id for p in report.rows}
            assert gone not in local(tiny_lane()).context_lengths(WINDOW)
        assert (window.num_rows, window.free_rows) == (1, 2)
        reports = finish(window)
        assert local(tiny_lane()).context_lengths(WINDOW) == {}
    assert tokens_of(reports)["r2"][-5:] == alone(tiny_lane(), requests[2])[-5:]
    assert not window.has_work


def test_retiring_one_row_changes_no_token_of_the_others() -> None:
    requests = [row(f"r{i}", prompt(i, 4 + i), 25) for i in range(4)]
    with opened(tiny_lane(), *requests, drafter=scripted(tiny_lane(), requests, 2)) as window:
        reports = [window.step(), window.step()]
        window.retire(RowId("r1"))
        reports += finish(window)
    expected = spoken(requests)
    said = tokens_of(reports)
    assert {n: t for n, t in said.items() if n != "r1"} == {n: t for n, t in expected.items() if n != "r1"}
    assert len(said["r1"]) == 7
    assert all(p.row_id != "r1" for report in reports[2:] for p in report.rows)


@pytest.mark.parametrize("when", ["fresh", "queued", "prefilling", "live"])
def test_a_closed_window_holds_nothing(when: str) -> None:
    window = open_window(tiny_lane(), prefill_chunk=16)
    if when != "fresh":
        window.admit(row("r", prompt(1, 4 if when == "live" else 40), 30))
    if when in ("prefilling", "live"):
        window.step()
    window.close()
    assert not window.has_work
    assert (window.num_rows, window.num_live) == (0, 0)
    assert local(tiny_lane()).num_sessions == 0


def test_what_cannot_be_played_is_refused_whole() -> None:
    lane = make_lane(max_context=64)
    window = open_window(lane)
    refused = [
        (row("empty", (), 5), InvalidRequest, "at least one token"),
        (row("no budget", (1,), 0), InvalidRequest, "one token of budget"),
        (row("too long", prompt(1, 60), 5), ContextLengthExceeded, "60 tokens and 5 to come"),
        (row("beyond", (1, VOCAB), 5), InvalidRequest, "0..127"),
        (row("below", (-1, 3), 5), InvalidRequest, "0..127"),
    ]
    for request, error, message in refused:
        with pytest.raises(error, match=message):
            window.admit(request)
    assert not window.has_work
    window.admit(row("fits", prompt(1, 60), 4))
    assert window.num_rows == 1
    window.close()


# Prefill beside rounds


def test_running_rows_play_a_round_in_every_step_while_prompts_are_read() -> None:
    running = row("running", prompt(1, 4), 48)
    long = [row(f"long{i}", prompt(10 + i, 150), 2) for i in range(3)]
    drafter = scripted(tiny_lane(), [running, *long], 1)
    with opened(tiny_lane(), running, drafter=drafter, prefill_rows=2, prefill_chunk=32) as window:
        reports = [window.step()]
        for request in long:
            window.admit(request)
        while any(progress_of(reports, r.row_id) == [] for r in long):
            report = window.step()
            reports.append(report)
            assert [len(p.tokens) for p in report.rows if p.row_id == "running"] == [2]
            assert report.prefilled_tokens <= 2 * 32
        assert len(reports) > 2 * (150 // 32)
        reports += finish(window)
    assert sum(report.prefilled_tokens for report in reports) == 4 + 3 * 150
    assert tokens_of(reports) == spoken([running, *long])


def test_a_row_id_is_taken_until_its_row_has_left() -> None:
    """In the queue, in prefill and in the round; a second row would end in the first one's context."""
    request = row("r", prompt(1, 40), 6)
    with opened(tiny_lane(), request, prefill_chunk=16) as window:
        for _ in range(4):  # queued, prefilling, prefilling, live
            with pytest.raises(InvalidRequest, match="has a row r already"):
                window.admit(request)
            window.step()
        window.retire(request.row_id)
        window.admit(request)
        assert tokens_of(finish(window)) == spoken([request])


def test_a_closed_window_says_so() -> None:
    window = open_window(tiny_lane())
    window.close()
    for play in (lambda: window.admit(row("r", prompt(1, 4), 2)), window.step):
        with pytest.raises(AssertionError, match="was closed"):
            play()


def test_waiting_rows_are_reported_until_they_play() -> None:
    requests = [row(f"r{i}", prompt(i, 40), 6) for i in range(3)]
    with opened(
        tiny_lane(), *requests, max_rows=2, prefill_chunk=32, drafter=scripted(tiny_lane(), requests, 0)
    ) as window:
        report = window.step()
        assert (report.width, report.live_rows, report.prefilling_rows, report.prefilled_tokens) == (
            0,
            0,
            3,
            64,
        )
        report = window.step()
        assert (report.live_rows, report.prefilling_rows, report.prefilled_tokens) == (2, 1, 16)
        assert set(report.seconds) >= {"prefill", "draft", "verify", "commit"}


def test_prompts_are_read_beside_each_other_in_chunks_of_any_width() -> None:
    requests = [row(f"r{n}", prompt(n, n), 3) for n in (1, 15, 16, 17, 64, 65, 130)]
    for chunk in (16, 64, 256):
        with opened(tiny_lane(), *requests, prefill_rows=8, prefill_chunk=chunk) as window:
            assert tokens_of(finish(window)) == spoken(requests)


def test_the_scripted_drafter_is_as_right_as_it_is_told() -> None:
    """The control of this file's fixture."""
    request = row("r", prompt(2, 9), 40)
    for right in (0, 3, 7):
        drafter: ScriptedDrafter = scripted(tiny_lane(), [request], right)
        with opened(tiny_lane(), request, drafter=drafter) as window:
            assert [p.walked for p in window.step().rows] == [right]
