"""Answers taken apart: thoughts, content and calls, however the text was cut."""

import json
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.openai.reasoning import Thinking, thinking_of
from deployments.openai.speech import Reading, Said, Speech
from deployments.openai.tools import Calling, tool_format
from tests.deployments.http_stub import tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"days": {"type": "integer"}}}},
}


@cache
def calling(is_parallel: bool = True) -> Calling:
    format_ = tool_format(tokenizer().chat_template)
    assert format_ is not None
    return Calling(format_, (TOOL,), is_parallel)


def call(name: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def hear(pieces: list[str], reading: Reading) -> Said:
    speech = Speech(reading)
    return Said.joined([*map(speech.push, pieces), speech.finish()])


def told(said: Said) -> tuple[str, str, list[tuple[str, object]]]:
    return said.thoughts, said.content, [(c.name, json.loads(c.arguments)) for c in said.calls]


def thinking(is_open: bool) -> Reading:
    return Reading(Thinking("<think>", "</think>", is_open), calling())


TOLD = [
    (Reading(), "<think>a</think> b" + call("f"), ("", "<think>a</think> b" + call("f"), [])),
    (Reading(None, calling()), "  Plain text.\n", ("", "  Plain text.\n", [])),
    (Reading(None, calling()), call("weather", city="Bern", days="3"),
     ("", "", [("weather", {"city": "Bern", "days": 3})])),
    (Reading(None, calling()), "Let me see.\n\n" + call("f") + "\n" + call("g", a="x\ny") + "\n",
     ("", "Let me see.", [("f", {}), ("g", {"a": "x\ny"})])),
    (Reading(None, calling(False)), call("f") + call("g"), ("", "", [("f", {})])),
    (Reading(None, calling()), "a <tool_call>\nnothing\n</tool_call> b",
     ("", "a <tool_call>\nnothing\n</tool_call> b", [])),
    (Reading(None, calling()), "a <tool_call>\n<function=f>\n<param",
     ("", "a <tool_call>\n<function=f>\n<param", [])),
    (Reading(None, calling()), call("weather", days="many"), ("", call("weather", days="many"), [])),
    (Reading(None, calling()), call("weather", days="many") + call("f"),
     ("", call("weather", days="many"), [("f", {})])),
    (Reading(None, calling()), call("f").removesuffix("</tool_call>"), ("", "", [("f", {})])),
    (Reading(None, calling()), "a < b <tool", ("", "a < b <tool", [])),
    (Reading(None, calling()), "a <tool_<tool_call>\n<function=f></function></tool_call>",
     ("", "a <tool_", [("f", {})])),
    (thinking(True), "\nHm.\n\nYes.\n</think>\n\nParis.", ("Hm.\n\nYes.", "Paris.", [])),
    (thinking(True), "Hm. \n", ("Hm.", "", [])),
    (thinking(True), "Hm.</think>\n\n" + call("f"), ("Hm.", "", [("f", {})])),
    (thinking(False), "<think>\nHm.\n</think>\n\nParis.\n", ("Hm.", "Paris.\n", [])),
    (thinking(False), " <think></think>Paris.", ("", "Paris.", [])),
    (thinking(False), "Say <think>a</think>.", ("", "Say <think>a</think>.", [])),
    (thinking(False), "<thin ice", ("", "<thin ice", [])),
    (thinking(False), "<think", ("", "<think", [])),
    (thinking(False), "", ("", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("reading", "text", "expected"), TOLD)
def test_parts_do_not_depend_on_the_cuts(reading: Reading, text: str, expected):
    assert told(hear([text], reading)) == expected
    assert told(hear(list(text), reading)) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>\n",
                              "</function>", "\n", " ", "a", "<", "tool_call>"]), max_size=12),
    st.booleans(),
    st.data(),
)  # fmt: skip
def test_any_text_cut_anywhere_gives_the_same(words: list[str], is_open: bool, data: st.DataObject):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told(hear(pieces, thinking(is_open))) == told(hear([text], thinking(is_open)))


def test_calls_are_told_as_soon_as_they_end_and_counted_on():
    speech = Speech(Reading(None, calling()))
    first, second = speech.push(call("f") + "\n<tool"), speech.push(call("g").removeprefix("<tool"))
    assert [(said.first_call, said.calls[0].name) for said in (first, second)] == [(0, "f"), (1, "g")]
    assert first.calls[0].id != second.calls[0].id
    assert speech.num_calls == 2


def test_content_that_cannot_be_a_marker_is_not_held_back():
    speech = Speech(thinking(False))
    assert speech.push("Paris <") == Said("Paris")
    assert speech.push("b") == Said(" <b")


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (r"{{ '<tool_call>\n<function=' + name }}", "qwen3_coder"),
        ("<tool_call>\n<function={{ name }}", "qwen3_coder"),
        ('<tool_call>{"name": "{{ tool_call.name }}"', "json_tools"),
        ("<tool_call>{{ name }}", None),
        ("{{ content }}", None),
    ],
)
def test_qwens_formats_are_those_that_mlx_lm_chooses(template: str, parser: str | None):
    from mlx_lm import tokenizer_utils

    seen = SimpleNamespace(chat_template=template, get_vocab=dict)
    assert tokenizer_utils._infer_tool_parser(seen) == parser
    found = tool_format(template)
    assert (found.parse.__module__.rpartition(".")[2] if found else None) == parser


def test_a_checkpoint_may_name_its_parser():
    found = tool_format("{{ content }}", "json_tools")
    assert found is not None
    assert Calling(found, ()).read('{"name": "f", "arguments": {"a": 1}}')[0].arguments == '{"a": 1}'
    laguna = tool_format("{{ content }}", "laguna")  # stands on another parser
    assert laguna is not None
    assert laguna.start == "<tool_call>"
    assert tool_format("{{ content }}", "no_such_parser") is None
    assert tool_format("{{ content }}", "../json_tools") is None


def test_reading_calls_brings_no_mlx_into_the_process():
    code = (
        "import sys; from deployments.openai.tools import tool_format; "
        "assert tool_format('<tool_call>{{ tool_call.name }}'); "
        "sys.exit(bool({'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "[]3",
        '"f"',
        '{"name": 3}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"a": NaN}}',
    ],
)
def test_what_is_no_call_is_refused(text: str):
    found = tool_format("", "json_tools")
    assert found is not None
    with pytest.raises(ValueError, match="not a tool call"):
        Calling(found, ()).read(text)


@pytest.mark.parametrize(
    ("prompt", "is_open", "is_over"),
    [
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False, False),
        ("<|im_start|>assistant\n<think>\n", True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
    ],
)
def test_a_prompt_that_ends_in_thoughts_is_seen(prompt: str, is_open: bool, is_over: bool):
    found = thinking_of(tokenizer().encode(prompt), tokenizer())
    assert found == Thinking("<think>", "</think>", is_open, is_over)
