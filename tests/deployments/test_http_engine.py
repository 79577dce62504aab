"""The whole way of a request without Ray: HTTP, the desk, a lane and the embedded pair, on one thread."""

import asyncio
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

import httpx2
import pytest

from deployments.desk import Desk
from deployments.generation import Event, Generation
from deployments.http import create_app
from deployments.lane import Lane
from deployments.telemetry import Statistics
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.request import RowId, RowRequest, Sampling
from dflash_core.text import TextStream, Tokenizer
from tests.core.engine_fixtures import SilentDrafter, finish, open_window, opened
from tests.deployments.http_stub import StubBackend
from tests.deployments.test_desk import LocalStage

PROMPT = "Name the capital of Japan, please."
MAX_TOKENS = 24
BIAS = {"300": 4.0, "12": -100.0}


@cache
def lane() -> LoadedLane:
    return load_lane(TARGET, DRAFTER)


class EngineBackend(StubBackend):
    """A backend that plays for real."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer.load(TARGET)
        stage = LocalStage()
        stage.lane = Lane(
            lambda window_id: open_window(lane(), window_id=window_id, max_rows=8), max_windows=2
        )
        self.desk = Desk(
            stage, Statistics("demo", "0"), self._new_text, self.tokenizer.eos_token_ids, max_rows=8
        )

    def _new_text(self, generation: Generation) -> TextStream:
        least = generation.sampling.min_tokens
        traces = generation.delivery.rounds
        return TextStream(self.tokenizer, generation.stop_strings, min_tokens=least, traces=traces)

    def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        return self.desk.play(generation)


def answers(*bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """Post completions, all at once."""

    async def post() -> list[dict[str, Any]]:
        transport = httpx2.ASGITransport(app=create_app(EngineBackend()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://local", timeout=60) as client:
            replies = await asyncio.gather(
                *[client.post("/v1/completions", json={"model": "stub-model", **body}) for body in bodies]
            )
        assert [reply.status_code for reply in replies] == [200] * len(bodies)
        return [reply.json() for reply in replies]

    return asyncio.run(post())


def alone(index: int, ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Tokens and numbers, the prompt's first, of one choice played classic in a window of its own."""
    sampling = Sampling(
        temperature=0.8,
        top_p=0.95,
        top_k=20,
        seed=5,
        logit_bias=tuple((int(token), bias) for token, bias in BIAS.items()),
        repetition_penalty=1.2,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        min_tokens=20,
    )
    tokenizer = Tokenizer.load(TARGET)
    request = RowRequest(
        RowId("alone"),
        ids,
        MAX_TOKENS,
        sampling.for_choice(index),
        tokenizer.eos_token_ids,
        num_top_logprobs=5,
        wants_prompt_logprobs=True,
    )
    with opened(lane(), request, width=1, drafter=SilentDrafter()) as window:
        progress = [row for report in finish(window) for row in report.rows]
    told = [n for row in progress for n in row.prompt_logprobs] + [
        n for row in progress for n in row.logprobs
    ]
    return [token for row in progress for token in row.tokens], [number.logprob for number in told]


def test_choices_tell_what_one_row_at_a_time_would() -> None:
    """Biases, penalties, a least length, numbers and the echo, among others who want nothing of it."""
    wishes = {
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "n": 2,
        "logprobs": 5,
        "echo": True,
        "temperature": 0.8,
        "seed": 5,
        "logit_bias": BIAS,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "min_tokens": 20,
        "return_token_ids": True,
    }
    plain = {"prompt": "Where is Haiti?", "max_tokens": MAX_TOKENS, "temperature": 0}
    answer, _ = answers(wishes, plain)
    ids = tuple(Tokenizer.load(TARGET).encode(PROMPT))
    spoken: set[tuple[int, ...]] = set()
    for index, choice in enumerate(answer["choices"]):
        tokens, numbers = alone(index, ids)
        assert choice["token_ids"] == tokens
        assert choice["text"].startswith(PROMPT)
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert logprobs[1:] == pytest.approx(numbers, abs=1e-4)
        assert all(len(tops) in (5, 6) for tops in choice["logprobs"]["top_logprobs"][1:])
        spoken.add(tuple(tokens))
    assert len(spoken) == 2
    assert answer["dflash"]["drafted"] > 0


def test_a_prompts_loglikelihood_is_asked_for_as_evaluation_harnesses_do() -> None:
    """One prompt of ids in a list, one token, echoed: the numbers of the prompt are the sum wanted."""
    ids = Tokenizer.load(TARGET).encode(PROMPT)
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    one, none = answers(body | {"max_tokens": 1}, body | {"max_tokens": 0})
    told, bare = one["choices"][0]["logprobs"], none["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(ids) + 1
    assert len(bare["tokens"]) == len(ids)
    assert (one["usage"]["completion_tokens"], none["usage"]["completion_tokens"]) == (1, 0)
    assert bare["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:-1], abs=1e-4)
    assert none["choices"][0]["text"] == PROMPT
    for token, tops in zip(bare["tokens"][1:], bare["top_logprobs"][1:], strict=True):
        assert token in tops


def test_rounds_told_to_those_who_ask_add_up_to_the_usage() -> None:
    ids = Tokenizer.load(TARGET).apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    chat = {"prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    told, plain = answers(chat | {"dflash": {"rounds": True}}, chat)
    choice, usage = told["choices"][0], told["usage"]
    rounds = choice["dflash"]["rounds"]
    tokens = [token for played in rounds for token in played["tokens"]]
    sources = [token["source"] for token in tokens]
    assert [token["id"] for token in tokens] == choice["token_ids"] == plain["choices"][0]["token_ids"]
    assert "".join(text for played in rounds for _, text in played["text"]) == choice["text"]
    assert sources[0] == "classic"  # reading the prompt gave it
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert sources.count("accepted") == accepted > 0
    played = [round_["round"] for round_ in rounds if round_["round"]]
    assert sum(numbers["accepted"] for numbers in played) == accepted
    assert len(played) == told["dflash"]["rounds"]
    assert "dflash" not in plain["choices"][0]
