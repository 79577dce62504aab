"""Fields of requests to grammars: which answers each lets through, and what is refused by name."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

import dflash_core.pair
from deployments.generation import Generation
from deployments.openai.arguments import ALL_KINDS, kinds, typed
from deployments.openai.grammar import grammar_of
from deployments.openai.limits import Limits
from deployments.openai.parse import parse_document
from deployments.openai.prepare import prepare
from deployments.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.openai.tools import calling_of
from dflash_core.errors import InvalidRequest, RowFailed
from dflash_core.text.grammar import Grammars
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.http_stub import StubBackend, chat, tokenizer


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer)


def parsed(fields: dict[str, Any]) -> GenerationRequest:
    return parse_document(chat(**fields), ChatRequest)


def fits(grammar: str, text: str) -> bool:
    """Whether an answer may be ``text`` and nothing more."""
    try:
        grammars().matcher(grammar, [*tokenizer().encode(text), *tokenizer().eos_token_ids])
    except RowFailed:
        return False
    return True


def grammar(prompt: str = "", **fields: Any) -> str:
    found = grammar_of(parsed(fields), tokenizer().encode(prompt), tokenizer())
    assert found is not None
    return found[0]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
GBNF = 'root ::= "yes" | no\nno ::= "n" "o"+'


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, {}]}', "{}"], ["[]", "x", '{"a": 1', ""]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            ['{"a": 1}', '{"a": 1, "b": "y", "c": 2}', '{\n  "a": 1\n}'],
            ['{"a": "1"}', '{"b": "x"}', '{"a": 1, "b": "z"}', '{"a":  1}', '{"a":\n\n1}'],
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            ['{"a": 1}', '{"a": 1, "b": "y"}'],
            ['{"a": 1, "c": 2}'],
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ["{}"], ["1"]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a": 1}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"regex": r"^\d{2}/[ab]$"}}, ["12/a"], ["12/c", "123/a", "12/a "]),
        (
            {"structured_outputs": {"choice": ["a", "ab", 'q"\n', "ß"]}},
            ["a", "ab", 'q"\n', "ß"],
            ["b", "abb", ""],
        ),
        ({"structured_outputs": {"grammar": GBNF}}, ["yes", "nooo"], ["n", "yesno"]),
        ({"structured_outputs": {"grammar": 'start: "yes" | /no+/'}}, ["yes", "nooo"], ["n", "yesno"]),
        (
            {
                "structured_outputs": {
                    "grammar": json.dumps({"grammars": [{"lark_grammar": 'start: "yes" | /no+/'}]})
                }
            },
            ["yes", "nooo"],
            ["n"],
        ),
        ({"guided_json": SCHEMA}, ['{"a": 1}'], ["{}"]),
        ({"guided_regex": "x+"}, ["xxx"], ["", "y"]),
        ({"guided_choice": ["yes", "no"]}, ["no"], ["n"]),
        ({"guided_grammar": GBNF, "guided_json": None}, ["no"], ["maybe"]),
    ],
    ids=str,
)
def test_an_answer_fits_exactly_what_was_asked_for(
    fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    asked = grammar(**fields)
    assert [text for text in right if not fits(asked, text)] == []
    assert [text for text in wrong if fits(asked, text)] == []


def test_free_answers_have_no_grammar() -> None:
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"guided_json": None},
        {"structured_outputs": None},
    ):
        assert grammar_of(parsed(fields), [], tokenizer()) is None


def test_a_schema_closed_by_strictness_is_closed_where_properties_are_named() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    open_one = {"type": "object", "additionalProperties": {"type": "integer"}}
    schema = {"type": "object", "properties": {"l": {"type": "array", "items": inner}, "o": open_one}}
    named = {"name": "n", "schema": schema, "strict": True}
    asked = grammar(response_format={"type": "json_schema", "json_schema": named})
    assert fits(asked, '{"l": [{"properties": 1}], "o": {"z": 1}}')
    assert not fits(asked, '{"l": [{"properties": 1, "z": 1}]}')
    assert not fits(asked, '{"z": 1}')
    assert "additionalProperties" not in inner  # the client's own is left alone


# Thoughts

JSON_OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}


def test_thoughts_that_the_prompt_has_begun_come_first() -> None:
    asked = grammar("<think>\n", **JSON_OBJECT)
    assert fits(asked, 'Is {"a" right?\n</think>\n\n{"a": 1}')
    assert not fits(asked, '{"a": 1}')
    assert not fits(asked, "hm</think> no")
    assert not fits(grammar("<think>\n\n</think>\n\n", **JSON_OBJECT), 'hm</think>{"a": 1}')


def test_thoughts_may_begin_where_the_template_knows_of_them() -> None:
    class Thinker:
        chat_template = "{{ '<think>' }}"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer(), name)

    request = parsed(JSON_OBJECT)
    (asked, _) = grammar_of(request, [], Thinker()) or ("", "")  # type: ignore[arg-type]
    assert fits(asked, '<think>hm</think>{"a": 1}')
    assert fits(asked, '{"a": 1}')
    assert not fits(grammar(**JSON_OBJECT), '<think>hm</think>{"a": 1}')  # the embedded pair's does not


# Tools


def tool(name: str, properties: dict[str, Any] | None = None, *required: str, **more: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if properties is not None:
        parameters = {"type": "object", "properties": properties, "required": list(required), **more}
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def call(name: str, **values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


WEATHER = tool(
    "weather",
    {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F"]},
        "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "box": {"$ref": "#/$defs/box"},
        "code": {"type": "string", "pattern": "^[a-z]{2}/"},
        "maybe": {"type": ["boolean", "null"]},
    },
    "city",
    **{"$defs": {"box": {"type": "array", "items": {"type": "number"}, "maxItems": 2}}},
)
TIME = tool("time")
NAMED = {"type": "function", "function": {"name": "weather"}}


def test_a_required_call_is_written_as_the_template_writes_it() -> None:
    asked = grammar(tools=[WEATHER, TIME], tool_choice="required")
    for text in (
        call("time"),
        call("weather", city="Zürich"),
        call(
            "weather",
            city="a\nb < c",
            days="3",
            unit="F",
            at="noon",
            box="[1, 2.5]",
            code="ab/c",
            maybe="null",
        ),
        call("time") + call("weather", city="") + "\n" + call("time"),
    ):
        assert fits(asked, text), text
    for text in (
        "",
        "Sure! " + call("time"),
        call("time") + " Done.",
        call("clock"),
        call("time", zone="x"),
        call("weather"),
        call("weather", city="a" * 21),
        call("weather", city="null"),
        call("weather", city="a</parameter>"),
        call("weather", city="a", days="0"),
        call("weather", city="a", days="three"),
        call("weather", city="a", unit="K"),
        call("weather", city="a", box="[1, 2, 3]"),
        call("weather", city="a", code="abc/"),
        call("weather", city="a", maybe="perhaps"),
    ):
        assert not fits(asked, text), text


def test_one_call_is_one_call() -> None:
    single = grammar(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert fits(single, call("time"))
    assert not fits(single, call("time") + call("time"))
    named = grammar(tools=[WEATHER, TIME], tool_choice=NAMED)
    assert fits(named, call("weather", city="Rome"))
    assert not fits(named, call("time"))
    assert not fits(named, call("weather", city="Rome") * 2)


def test_a_forced_call_may_follow_thoughts() -> None:
    asked = grammar("<think>\n", tools=[TIME], tool_choice="required")
    assert fits(asked, "I need the time.\n</think>\n\n" + call("time"))


def test_a_structured_answer_may_be_a_call_instead() -> None:
    asked = grammar(tools=[TIME], **JSON_OBJECT)
    assert fits(asked, call("time"))
    assert fits(asked, '{"a": 1}')
    assert not fits(asked, "Hello")
    assert not fits(grammar(tools=[TIME], tool_choice="none", **JSON_OBJECT), call("time"))


def test_json_calls_are_one_object_between_the_markers() -> None:
    class Hermes:
        chat_template = "<tool_call>{{ tool_call.name }}"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer(), name)

    request = parsed({"tools": [WEATHER, TIME], "tool_choice": "required"})
    (asked, _) = grammar_of(request, [], Hermes()) or ("", "")  # type: ignore[arg-type]
    right = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "box": [1]}}\n</tool_call>'
    assert fits(asked, right)
    assert fits(asked, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    assert not fits(asked, right.replace("Rome", "R" * 21))
    assert not fits(asked, right.replace("box", "bag"))


def test_what_may_be_written_is_read_back_as_the_schema_says() -> None:
    request = parsed({"tools": [WEATHER, TIME]})
    assert isinstance(request, ChatRequest)
    calling = calling_of(request, tokenizer())
    assert calling is not None
    text = call("weather", city="3", days="3", unit="F", at="null", box="[1, 2]", code="ab/", maybe="true")
    (read,) = calling.read(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    arguments = json.loads(read.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    assert arguments == {
        "city": "3", "days": 3, "unit": "F", "at": None, "box": [1, 2], "code": "ab/", "maybe": True
    }  # fmt: skip


def test_kinds_follow_references_and_alternatives() -> None:
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert kinds({"anyOf": [{"$ref": "#/$defs/n"}, {"const": None}]}, root) == {"integer", "null"}
    assert kinds({"enum": ["a", 1]}, root) == {"string", "integer", "number"}
    assert "string" in kinds({"$ref": "#/$defs/loop"}, root)
    assert kinds(False, root) == frozenset()
    many = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10}}}
    assert kinds({"$ref": "#/$defs/a"}, many) == ALL_KINDS  # and it takes no time
    schema = {"properties": {"n": {"$ref": "#/$defs/n"}, "s": {}}, **root}
    assert typed({"n": "5", "s": "5", "x": "5"}, schema) == {"n": 5, "s": "5", "x": "5"}
    assert typed({"n": "five"}, schema) == {"n": "five"}


# Requests


def prepared(**fields: Any) -> Generation:
    return prepare(parsed(fields), StubBackend(), Limits(), "request-1")


def test_the_end_of_a_grammar_ends_the_answer_even_if_end_tokens_are_ignored() -> None:
    assert prepared(ignore_eos=True).stop_token_ids == frozenset()
    constrained = prepared(ignore_eos=True, guided_regex="a")
    assert constrained.stop_token_ids == tokenizer().eos_token_ids
    assert constrained.grammar_param == "guided_regex"


def test_completions_take_the_same_fields() -> None:
    request = parse_document(
        {"model": "stub-model", "prompt": "<think>", "guided_choice": ["a"]}, CompletionRequest
    )
    (asked, _) = grammar_of(request, tokenizer().encode("<think>"), tokenizer()) or ("", "")
    assert fits(asked, "a")
    assert not fits(asked, "hm</think>a")  # a plain prompt has no thoughts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "{}"}, "guided_grammar"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [TIME]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [tool("two words")]}, "tools[0].function"),
        ({"tool_choice": "required", "tools": [tool("f", {"a b": {}}, "a b")]}, "tools[0].function"),
        *(
            ({"tool_choice": "required", "tools": [tool("f", {"a": bad})]}, "tools[0].function.parameters")
            for bad in ({"enum": 5}, {"type": 7}, {"anyOf": 3}, 5)
        ),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(**fields)
    assert refused.value.param == param


def test_a_template_whose_calls_are_not_known_forces_none() -> None:
    class Pythonic:
        tool_parser_type = "pythonic"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer(), name)

    with pytest.raises(InvalidRequest, match="auto") as refused:
        grammar_of(parsed({"tools": [TIME], "tool_choice": "required"}), [], Pythonic())  # type: ignore[arg-type]
    assert refused.value.param == "tool_choice"
    assert Tokenizer.load(dflash_core.pair.TARGET).tool_parser_type is None
