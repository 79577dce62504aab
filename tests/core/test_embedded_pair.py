"""The embedded pair on chats of its domain: exact against mlx-lm, faster in rounds than tokens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from dflash_core.checkpoints import load_target
from dflash_core.events import RoundReport
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import RowId, RowRequest, Sampling
from dflash_core.text import Tokenizer
from tests.core.engine_fixtures import SilentDrafter, finish, opened, progress_of, tokens_of

MAX_TOKENS = 64
QUESTIONS = (
    "Where is Haiti?",
    "How do I write a Python function that merges two dictionaries?",
    "What is 48 - 10?",
    "What is the capital of France?",
    "Write a short story about a fox and a lantern.",
    'Extract the name and age as JSON: "Ana is 31 years old."',
    "Write a SQL query that counts the orders of each customer.",
    "Say hello.",
)


@cache
def lane() -> LoadedLane:
    return load_lane(TARGET, DRAFTER)


@cache
def requests() -> tuple[RowRequest, ...]:
    tokenizer = Tokenizer.load(TARGET)
    return tuple(
        RowRequest(
            RowId(f"q{i}"),
            tuple(tokenizer.apply_chat([{"role": "user", "content": question}])),
            MAX_TOKENS,
            stop_token_ids=tokenizer.eos_token_ids,
        )
        for i, question in enumerate(QUESTIONS)
    )


@cache
def by_mlx_lm() -> dict[str, tuple[int, ...]]:
    """Greedy tokens of mlx-lm's own loop, through the end-of-turn token."""
    model = load_target(TARGET).model
    answers: dict[str, tuple[int, ...]] = {}
    for request in requests():
        said: list[int] = []
        for token, _ in generate_step(mx.array(request.tokens), model, max_tokens=MAX_TOKENS):
            said.append(int(token))
            if said[-1] in request.stop_token_ids:
                break
        answers[request.row_id] = tuple(said)
    return answers


def test_the_answers_are_worth_comparing() -> None:
    answers = by_mlx_lm()
    assert len(set(answers.values())) == len(QUESTIONS)
    assert sum(map(len, answers.values())) > 150
    text = Tokenizer.load(TARGET).decode(answers["q3"])
    assert "Paris" in text


def test_one_by_one_equals_mlx_lm_token_for_token() -> None:
    for request in requests():
        with opened(lane(), request, width=16) as window:
            reports = finish(window)
        assert tokens_of(reports)[request.row_id] == by_mlx_lm()[request.row_id]


def test_a_window_of_four_equals_mlx_lm_token_for_token() -> None:
    with opened(lane(), *requests(), width=16, max_rows=4) as window:
        reports = finish(window)
    assert tokens_of(reports) == by_mlx_lm()
    assert max(report.live_rows for report in reports) == 4
    rounds = [p for request in requests() for p in progress_of(reports, request.row_id)]
    assert sum(p.accepted for p in rounds) > 0
    assert len(rounds) < sum(map(len, by_mlx_lm().values())) / 3


def test_a_clamped_window_loses_drafts_but_no_token() -> None:
    some = requests()[:4]
    accepted: dict[str, int] = {}
    for accept in ("clamp", "per_row"):
        with opened(lane(), *some, width=16, accept=accept) as window:
            reports = finish(window)
        assert tokens_of(reports) == {r.row_id: by_mlx_lm()[r.row_id] for r in some}
        accepted[accept] = sum(p.accepted for report in reports for p in report.rows)
    assert 0 < accepted["clamp"] < accepted["per_row"]


def test_company_costs_no_row_its_drafts() -> None:
    """Contexts are per row: a window of four walks as far as four windows of one."""

    def walked(*together: RowRequest) -> int:
        with opened(lane(), *together, width=16, max_rows=4) as window:
            reports = finish(window)
        return sum(p.walked for request in together for p in progress_of(reports, request.row_id))

    assert walked(*requests()) >= 0.98 * sum(walked(request) for request in requests())


def test_answers_end_with_their_end_of_turn() -> None:
    with opened(lane(), *requests(), width=16) as window:
        reports = finish(window)
    for request in requests():
        last = progress_of(reports, request.row_id)[-1]
        said = tokens_of(reports)[request.row_id]
        assert (last.finish == "stop") == (said[-1] in request.stop_token_ids)
        assert not set(said[:-1]) & request.stop_token_ids


def test_wishes_hold_in_compiled_graphs_too() -> None:
    """Rows that want all sorts of things, speculating together, against each of them classic and alone."""
    hot = {"temperature": 0.9, "seed": 3}
    bias = ((300, 4.0), (12, -100.0))
    wishes = (
        Sampling(),
        Sampling(logit_bias=bias, min_tokens=20),
        Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
        Sampling(**hot, top_p=0.95, presence_penalty=0.6, logit_bias=bias),
    )
    rows = [
        replace(
            request,
            max_tokens=24,
            sampling=wish,
            num_top_logprobs=num_top,
            wants_prompt_logprobs=num_top is not None,
        )
        for request, wish, num_top in zip(requests(), wishes, (5, None, 1, 0), strict=False)
    ]
    with opened(lane(), *rows, width=8) as window:
        together = finish(window)
    assert sum(p.accepted for report in together for p in report.rows) > 0
    for row in rows:
        with opened(lane(), row, width=1, drafter=SilentDrafter()) as window:
            alone = finish(window)
        assert tokens_of(together)[row.row_id] == tokens_of(alone)[row.row_id]
        assert len(numbers_of(alone, row)) == (
            0 if row.num_top_logprobs is None else len(row.tokens) - 1 + len(tokens_of(alone)[row.row_id])
        )
        assert numbers_of(together, row) == pytest.approx(numbers_of(alone, row), abs=1e-4)


def numbers_of(reports: Sequence[RoundReport], row: RowRequest) -> list[float]:
    """Log-probabilities of a row's prompt and answer."""
    progress = progress_of(reports, row.row_id)
    return [n.logprob for p in progress for n in (*p.prompt_logprobs, *p.logprobs)]
