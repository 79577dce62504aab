"""Log-probabilities are the target's own, for accepted and bonus tokens alike, and cost nobody else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_core.errors import InvalidRequest
from dflash_core.events import RoundReport, TokenLogprobs
from dflash_core.request import RowRequest
from dflash_core.sampling import pack
from dflash_core.target import Verdict
from tests.core.engine_fixtures import (
    VOCAB,
    ListedWidths,
    ScriptedDrafter,
    eager,
    finish,
    opened,
    progress_of,
    prompt,
    row,
    tiny_lane,
    tokens_of,
)
from tests.core.sampling_reference import logprobs_after, speak

PLAIN = row("plain", prompt(1, 9), 14)


def asking(name: str, number: int, length: int, num_top: int, **sampling: Any) -> RowRequest:
    return replace(row(name, prompt(number, length), 14, **sampling), num_top_logprobs=num_top)


GREEDY = asking("greedy", 2, 7, 0)
FIVE = asking("five", 3, 12, 5)
TWENTY = asking("twenty", 4, 30, 20, temperature=1.1, top_k=30, seed=5)
THREE = asking(
    "three", 5, 5, 3, temperature=0.9, seed=6, presence_penalty=1.0, logit_bias=((4, 6.0), (9, -100.0))
)
ALL = (PLAIN, GREEDY, FIVE, TWENTY, THREE)


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def knowing(requests: Sequence[RowRequest]) -> ScriptedDrafter:
    scripts = {request.row_id: (*request.tokens, *speak(request).tokens) for request in requests}
    return ScriptedDrafter(
        tiny_lane().drafter, scripts, lambda row_id, length: (3 * length + len(row_id)) % 8
    )


def numbers_of(reports: Sequence[RoundReport], name: str) -> tuple[TokenLogprobs, ...]:
    progress = progress_of(reports, name)
    assert all(len(p.logprobs) == len(p.tokens) for p in progress)
    return tuple(number for p in progress for number in p.logprobs)


def check(reports: Sequence[RoundReport], request: RowRequest) -> None:
    """Tokens and numbers of one row are the reference's."""
    spoken = speak(request)
    assert tokens_of(reports)[request.row_id] == spoken.tokens
    if request.num_top_logprobs is None:
        assert all(p.logprobs == () for p in progress_of(reports, request.row_id))
        return
    numbers = numbers_of(reports, request.row_id)
    for number, token, expected in zip(numbers, spoken.tokens, spoken.logprobs, strict=True):
        check_number(number, token, expected, request.num_top_logprobs)


def check_number(number: TokenLogprobs, token: int, expected: np.ndarray, num_top: int) -> None:
    assert number.logprob == pytest.approx(expected[token], abs=1e-4)
    best = np.argsort(-expected)[:num_top]
    assert [t for t, _ in number.top] == best.tolist()
    assert np.array([p for _, p in number.top]) == pytest.approx(expected[best], abs=1e-4)


@pytest.mark.parametrize("width", [1, 2, 8, 16])
@pytest.mark.parametrize("request_", ALL, ids=lambda r: r.row_id)
def test_a_row_alone_has_the_references_numbers(request_: RowRequest, width: int) -> None:
    with opened(tiny_lane(), request_, width=width, drafter=knowing([request_])) as window:
        check(finish(window), request_)


@pytest.mark.parametrize("widths", [(1,), (16,), (8, 1, 4)], ids=str)
def test_so_has_every_row_of_a_mixed_batch(widths: tuple[int, ...]) -> None:
    with opened(tiny_lane(), *ALL, width=ListedWidths(widths), drafter=knowing(ALL)) as window:
        reports = finish(window)
    for request in ALL:
        check(reports, request)
    assert any(len(p.tokens) > 2 for p in progress_of(reports, "five")) == (max(widths) > 1)


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_so_has_a_row_that_takes_anothers_slot(max_rows: int) -> None:
    lengths = [replace(request, max_tokens=6 + 2 * i) for i, request in enumerate(ALL)]
    with opened(tiny_lane(), *lengths, max_rows=max_rows, drafter=knowing(lengths)) as window:
        reports = finish(window)
    for request in lengths:
        check(reports, request)


def test_so_has_a_row_that_joins() -> None:
    with opened(tiny_lane(), PLAIN, width=4, drafter=knowing(ALL)) as window:
        reports = [window.step(), window.step()]
        for request in ALL[1:]:
            window.admit(request)
            reports.append(window.step())
        reports += finish(window)
    for request in ALL:
        check(reports, request)


def test_processors_and_temperature_leave_the_numbers_as_they_are() -> None:
    """The control for *raw*: the biased token is chosen, its number says how unlikely it was."""
    forced = replace(FIVE, sampling=replace(FIVE.sampling, logit_bias=((77, 100.0),)))
    with opened(tiny_lane(), forced, width=8) as window:
        reports = finish(window)
    check(reports, forced)
    assert set(tokens_of(reports)["five"]) == {77}
    assert all(number.logprob < -0.5 for number in numbers_of(reports, "five"))


def test_a_stop_token_and_a_budget_cut_the_numbers_too() -> None:
    third = speak(FIVE).tokens[2]
    stopped = replace(FIVE, stop_token_ids=frozenset({third}))
    short = replace(TWENTY, max_tokens=3)
    with opened(tiny_lane(), stopped, short, width=16, drafter=knowing([FIVE, TWENTY])) as window:
        reports = finish(window)
    check(reports, stopped)
    check(reports, short)


# Prompts


def scored(name: str, number: int, length: int, num_top: int, **more: Any) -> RowRequest:
    return replace(asking(name, number, length, num_top), wants_prompt_logprobs=True, max_tokens=4, **more)


def check_prompt(reports: Sequence[RoundReport], request: RowRequest, length: int) -> None:
    found = [p for p in progress_of(reports, request.row_id) if p.prompt_logprobs]
    numbers = found[0].prompt_logprobs if found else ()
    assert len(found) <= 1
    assert len(numbers) == length - 1
    for i, number in enumerate(numbers, start=1):
        expected = logprobs_after(request.tokens[:i])
        check_number(number, request.tokens[i], expected, request.num_top_logprobs or 0)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_a_prompts_numbers_come_by_chunks(length: int) -> None:
    request = scored("scored", 8, length, 5)
    with opened(tiny_lane(), request, prefill_chunk=16) as window:
        reports = finish(window)
    check(reports, request)
    check_prompt(reports, request, length)


def test_prompts_of_many_lengths_are_measured_together_with_others_that_are_not() -> None:
    rows = (
        scored("a", 9, 37, 1),
        PLAIN,
        scored("b", 10, 3, 5),
        FIVE,
        scored("c", 11, 21, 0),
        scored("d", 12, 18, 2),
    )
    with opened(tiny_lane(), *rows, prefill_chunk=16, prefill_rows=4) as window:
        reports = finish(window)
    for request in rows:
        check(reports, request)
        check_prompt(reports, request, len(request.tokens) if request.wants_prompt_logprobs else 1)


def test_how_much_a_neighbour_asks_for_may_change_between_chunks() -> None:
    first, second = scored("few", 31, 90, 1), scored("many", 32, 20, 5)
    with opened(
        tiny_lane(), first, prefill_chunk=64, prefill_rows=2, drafter=knowing([first, second])
    ) as window:
        reports = [window.step()]  # one chunk of the first alone
        window.admit(second)
        reports += finish(window)
    for request in (first, second):
        check_prompt(reports, request, len(request.tokens))
        check(reports, request)


def test_a_long_prompt_leaves_no_larger_caches_to_the_next() -> None:
    with opened(tiny_lane(), row("long", prompt(33, 200), 2), prefill_rows=1) as window:
        before = window._prefill.caches.capacity
        finish(window)
        assert window._prefill.caches.capacity == before


def test_what_a_moved_row_had_committed_is_no_prompt() -> None:
    request = scored("scored", 8, 20, 1)
    said = speak(request).tokens
    moved = replace(request, tokens=request.tokens + said[:2], max_tokens=2, prompt_length=20)
    with opened(tiny_lane(), moved, prefill_chunk=16) as window:
        reports = finish(window)
    assert tokens_of(reports)["scored"] == said[2:]
    check_prompt(reports, moved, 20)


def test_a_row_that_leaves_while_its_prompt_is_read_leaves_nothing() -> None:
    request = scored("scored", 8, 60, 1)
    with opened(tiny_lane(), request, prefill_chunk=16) as window:
        window.step()
        window.retire(request.row_id)
        again = scored("scored", 13, 20, 1)
        window.admit(again)
        check_prompt(finish(window), again, 20)


# What it costs others


def test_a_round_has_one_blocking_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Verdict.read

    def noted(self: Verdict) -> Any:
        reads.append(self.packed.ndim)
        return read(self)

    monkeypatch.setattr(Verdict, "read", noted)
    with opened(tiny_lane(), PLAIN, FIVE, width=4, drafter=knowing([PLAIN, FIVE])) as window:
        reports = finish(window)
    assert reads[0] == 1  # both prompts, in one chunk
    assert len(reads) == 1 + sum(report.width > 0 for report in reports)


def test_a_window_in_which_nobody_asks_measures_nothing() -> None:
    assert pack([row_.sampling for row_ in ALL], VOCAB).variant.num_top is None
    with opened(tiny_lane(), PLAIN) as window:
        window.step()
        assert window.plan().block.sampling.asked is None


@pytest.mark.parametrize(("num_top", "scores"), [(-1, False), (VOCAB + 1, False), (None, True)])
def test_numbers_that_cannot_be_are_refused(num_top: int | None, scores: bool) -> None:
    request = replace(PLAIN, num_top_logprobs=num_top, wants_prompt_logprobs=scores)
    with opened(tiny_lane()) as window, pytest.raises(InvalidRequest):
        window.admit(request)
