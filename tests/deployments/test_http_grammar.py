"""Structured answers and forced calls over HTTP: refusals by a stub, answers by the embedded pair."""

import asyncio
import json
import threading
from typing import Any

import httpx2
import jsonschema
import pytest

from deployments.desk import Desk
from deployments.generation import ModelCard
from deployments.http import create_app
from deployments.lane import Lane
from deployments.openai.limits import Limits
from deployments.telemetry import Statistics
from deployments.ticket import Ticket
from dflash_core.text import TextStream
from dflash_core.text.grammar import MAX_GRAMMAR_BYTES, Grammars
from tests.core.engine_fixtures import open_window
from tests.deployments.http_stub import StubBackend, chat
from tests.deployments.random_schemas import random_schema
from tests.deployments.test_desk import LocalStage
from tests.deployments.test_http_engine import EngineBackend, lane

MANY = 900  # tokens: more than any of these answers takes
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


def post(
    backend: StubBackend, *bodies: dict[str, Any], limits: Limits | None = None
) -> list[httpx2.Response]:
    """Post chats, all at once."""

    async def together() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app=create_app(backend, limits=limits))
        async with httpx2.AsyncClient(transport=transport, base_url="http://local", timeout=120) as client:
            asked = [client.post("/v1/chat/completions", json=chat(**body)) for body in bodies]
            return await asyncio.gather(*asked)

    return asyncio.run(together())


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Refusals


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        (
            {"response_format": schema_format({"type": "nothing"})},
            "response_format.json_schema.schema",
            "nothing",
        ),
        (
            {"response_format": schema_format({"type": "object", "uniqueItems": True, "contains": {}})},
            "response_format.json_schema.schema",
            "contains",
        ),
        (
            {"response_format": schema_format({"type": "integer", "minimum": 5, "maximum": 3})},
            "response_format.json_schema.schema",
            "minimum",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar", "nobody"),
        ({"guided_regex": "a" * MAX_GRAMMAR_BYTES}, "guided_regex", "bytes"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "5",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_a_400_that_names_it(
    fields: dict[str, Any], param: str, word: str
) -> None:
    backend = StubBackend()
    (refused,) = post(backend, fields)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert word in error["message"]
    assert backend.generations == []  # nothing is half admitted


def test_a_grammar_that_takes_too_long_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, is_over = StubBackend(), threading.Event()
    monkeypatch.setattr(Grammars, "matcher", lambda self, grammar: is_over.wait(60))
    (refused,) = post(backend, {"guided_regex": "a"}, limits=Limits(grammar_timeout_s=0.0))
    assert refused.status_code == 400
    is_over.set()
    assert refused.json()["error"]["param"] == "guided_regex"
    assert backend.generations == []


def test_a_grammar_behind_others_that_take_long_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, is_over = StubBackend(), threading.Event()
    monkeypatch.setattr(Grammars, "matcher", lambda self, grammar: is_over.wait(60))
    monkeypatch.setattr("deployments.preparing.QUEUE_S", 0.05)
    answers = post(backend, *[{"guided_regex": "a"}] * 2, limits=Limits(grammar_timeout_s=0.5))
    is_over.set()
    assert sorted(answer.status_code for answer in answers) == [400, 429]
    assert backend.generations == []


def test_a_row_takes_its_grammar_wherever_it_moves() -> None:
    backend = StubBackend()
    (answered,) = post(backend, {"guided_regex": "a+", "max_tokens": 9})
    assert answered.status_code == 200
    text, statistics = TextStream(backend.tokenizer), Statistics("stub-model", "0")
    ticket = Ticket(backend.last, text, backend.tokenizer.eos_token_ids, 0.0, statistics)
    ticket.committed += [70, 71]
    moved = ticket.row_request()
    assert moved.grammar == backend.last.grammar
    assert moved.grammar is not None
    assert moved.tokens[moved.prompt_length :] == (70, 71)


# Answers


class RoomyBackend(EngineBackend):
    """The embedded pair with its own context."""

    def __init__(self) -> None:
        super().__init__()
        card, stage = self.model_card, LocalStage()
        stage.lane = Lane(lambda window_id: open_window(lane(), width=4, window_id=window_id), max_windows=1)
        statistics, eos = Statistics("demo", "0"), self.tokenizer.eos_token_ids
        self.desk = Desk(stage, statistics, self._new_text, eos, max_rows=16)
        self.model_card = ModelCard(card.names, card.created, 8192, card.defaults)


def test_answers_are_what_was_asked_for_side_by_side() -> None:
    """Ten random schemas, forced calls and a free answer in one window; the free one as if it were alone."""
    schemas = [random_schema(seed, depth=2) for seed in range(10)]
    free: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Name the capital of Japan, please."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    hot = {"temperature": 0.8, "top_p": 1, "top_k": -1}
    called = {
        "tools": TOOLS,
        "max_tokens": MANY,
        "messages": [{"role": "user", "content": "Weather in Bern?"}],
    }
    bodies = [
        *(
            {"response_format": schema_format(s), "max_tokens": MANY, "seed": i, **hot}
            for i, s in enumerate(schemas)
        ),
        {**called, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "temperature": 0},
        {
            **called,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": 1,
            "ignore_eos": True,
            **hot,
        },
        {"response_format": schema_format(schemas[0]), "max_tokens": 3, "temperature": 0},
        free,
    ]
    replies = [reply.json() for reply in post(RoomyBackend(), *bodies)]
    choices = [reply["choices"][0] for reply in replies]
    for schema, choice in zip(schemas, choices, strict=False):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    for choice in choices[10:12]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (called_one,) = choice["message"]["tool_calls"]
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        arguments = json.loads(called_one["function"]["arguments"])
        jsonschema.validate(arguments, parameters[called_one["function"]["name"]])
    assert choices[10]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choices[12]["finish_reason"] == "length"
    (alone,) = post(RoomyBackend(), free)
    assert choices[13]["message"] == alone.json()["choices"][0]["message"]
