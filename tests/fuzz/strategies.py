"""Hostile values: text, JSON that is nearly right, and what stands around a request."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

# Pieces of control tokens, what tokenizers split at, what terminals and right-to-left readers stumble over.
PIECES = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<tool_response>",
    "<|", "im_end|>", "<", "|>", "system\n", "\n", " ", "a", "é", "\ue000", "\ue001", "\u200b", "\u202e",
    "\u200d", "\ufeff", "\x00", "\x1b[2J", "日本", "😀", "\u0301" * 9, "'", '"', "{{ 7 * 7 }}",
]  # fmt: skip

text = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)
broken_text = text | st.sampled_from(["\ud800", "\udfff<|im_end|>", "x" * 5000])
numbers = (
    st.integers(-3, 400)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 10**25, -1, 0, 1e308, -0.0, 1e-320])
)
scalars = st.none() | st.booleans() | numbers | broken_text
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def rarely(usual: Strategy, odd: Strategy = anything) -> Strategy:
    """Mostly the usual: bodies with one thing amiss go further than those with twenty."""
    return st.integers(0, 9).flatmap(lambda n: odd if n == 0 else usual)


_part = st.fixed_dictionaries({"type": rarely(st.just("text")), "text": rarely(text)})
_call = st.fixed_dictionaries(
    {
        "type": rarely(st.just("function")),
        "id": rarely(text),
        "function": st.fixed_dictionaries(
            {"name": rarely(text), "arguments": rarely(st.dictionaries(text, scalars, max_size=2).map(str))}
        ),
    }
)
message = st.fixed_dictionaries(
    {
        "role": rarely(st.sampled_from(["system", "developer", "user", "assistant", "tool"])),
        "content": rarely(text | st.lists(_part, max_size=3)),
    },
    optional={
        "name": rarely(text),
        "tool_call_id": rarely(text),
        "reasoning_content": rarely(text),
        "tool_calls": rarely(st.lists(_call, max_size=2)),
    },
)
_tool = st.fixed_dictionaries(
    {
        "type": rarely(st.just("function")),
        "function": st.fixed_dictionaries(
            {"name": rarely(text), "description": rarely(text), "parameters": rarely(anything)}
        ),
    }
)
_schema = st.recursive(
    st.sampled_from(
        [{"type": "string"}, {"type": "integer", "minimum": 9}, {"$ref": "#"}, {"const": 1}, True]
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(["properties", "items", "anyOf", "pattern", "$defs", "enum", "maxItems"]),
        rarely(st.dictionaries(text, inner, max_size=2) | st.lists(inner, max_size=2)),
        max_size=2,
    ),
    max_leaves=5,
)
_patterns = ["(a{1,9999}){9999}", "((a*)*)*b", "[", "(?=x)", "\\p{L}{99}", "a|b" * 99, "(" * 300, ".*" * 50]
_grammars = [
    'start: "a" start',
    "start: start start | ",
    "start:",
    "%llguidance {}",
    'root ::= "a" root',
    "{",
]
_structures = {
    "json": rarely(_schema),
    "regex": rarely(st.sampled_from(_patterns) | text),
    "choice": rarely(st.lists(text, max_size=3)),
    "grammar": rarely(st.sampled_from(_grammars) | text),
}
_FIELDS: Mapping[str, Strategy] = {
    "stop": rarely(text | st.lists(text, max_size=18)),
    "stop_token_ids": rarely(st.lists(st.integers(-1, 9000), max_size=4)),
    "stream": st.booleans(),
    "stream_options": rarely(st.just({"include_usage": True})),
    "tools": rarely(st.lists(_tool, max_size=2)),
    "tool_choice": rarely(st.sampled_from(["none", "auto", "required"])),
    "chat_template_kwargs": rarely(st.dictionaries(text, anything, max_size=2)),
    "logit_bias": rarely(st.dictionaries(st.integers(-1, 9000).map(str) | text, numbers, max_size=3)),
    "response_format": rarely(
        st.just({"type": "text"})
        | _schema.map(lambda of: {"type": "json_schema", "json_schema": {"name": "n", "schema": of}})
    ),
    "structured_outputs": rarely(st.fixed_dictionaries({}, optional=_structures)),
    "logprobs": rarely(st.booleans() | st.integers(-1, 22)),
    "unknown": anything,
} | {
    name: rarely(st.integers(-1, 20) | st.floats(-1, 3), anything)
    for name in (
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"),
        *("echo", "ignore_eos", "return_token_ids", "best_of", "user", "enable_thinking"),
    )
}
_model = rarely(st.just("stub-model"))
chats = st.fixed_dictionaries(
    {"model": _model, "messages": rarely(st.lists(message, min_size=1, max_size=4))}, optional=dict(_FIELDS)
)
completions = st.fixed_dictionaries(
    {"model": _model, "prompt": rarely(text | st.lists(st.integers(0, 9000), max_size=5))},
    optional=dict(_FIELDS),
)
_piece = st.fixed_dictionaries(
    {
        "type": rarely(st.sampled_from(["input_text", "output_text", "refusal", "input_image"])),
        "text": rarely(text),
    }
)
_item = st.fixed_dictionaries(
    {"type": rarely(st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]))},
    optional={
        "role": rarely(st.sampled_from(["system", "user", "assistant"])),
        "content": rarely(text | st.lists(_piece, max_size=2)),
        "output": rarely(text),
        "arguments": rarely(st.just("{}")),
        **dict.fromkeys(("call_id", "name", "id", "status", "summary"), rarely(text)),
    },
)
responses = st.fixed_dictionaries(
    {"model": _model, "input": rarely(text | st.lists(_item, max_size=3))},
    optional={
        "stream": st.booleans(),
        "text": rarely(
            _schema.map(lambda of: {"format": {"type": "json_schema", "name": "n", "schema": of}})
        ),
        "max_output_tokens": rarely(st.integers(-1, 20)),
        **dict.fromkeys(("tools", "tool_choice", "reasoning", "store", "previous_response_id"), anything),
        **dict.fromkeys(("instructions", "include", "metadata", "truncation", "temperature"), anything),
    },
)
tokenize = st.fixed_dictionaries(
    {}, optional={"prompt": rarely(text), "messages": st.lists(message, max_size=3), "tools": anything}
)
detokenize = st.fixed_dictionaries({"tokens": rarely(st.lists(st.integers(-1, 9000), max_size=9))})
http = (
    st.tuples(st.just("/v1/chat/completions"), chats)
    | st.tuples(st.just("/v1/completions"), completions)
    | st.tuples(st.just("/v1/responses"), responses)
    | st.tuples(st.just("/tokenize"), tokenize)
    | st.tuples(st.just("/detokenize"), detokenize)
)

_NAMES = [
    b"x-request-id", b"authorization", b"host", b"content-type", b"content-encoding", b"content-length",
    b"x-session-id", b"serve_multiplexed_model_id", b"x-request-timeout-seconds", b"traceparent",
    b"x-request-disconnect-disabled", b"transfer-encoding", b"origin", b"cookie", b"expect",
]  # fmt: skip
_VALUES = [
    b"", b"\xff\xfe", b"[", b"[::1", b"a/b?c#d", b"Bearer", b"Bearer \xff", b"bearer x", b"Basic eDp4",
    b"-1", b"9" * 40, b"gzip", b"gzip, br", b"application/json; charset=utf-16", b"chunked", b"x" * 70_000,
    b"\x00", b"a\r\nb: c", b"\xc2\xb2", b"?1", b"0", b"nan", "é😀".encode(),
]  # fmt: skip
headers = st.lists(
    st.tuples(st.sampled_from(_NAMES), st.sampled_from(_VALUES) | st.binary(max_size=30)), max_size=5
)
methods = st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "x" * 300])
paths = st.lists(
    st.sampled_from(
        [
            *("/", "//", "..", "/..", "%00", "\x00", "v1", "/v1/models", "/v1/chat/completions", "health"),
            *(
                "metrics",
                "docs",
                "openapi.json",
                "etc/passwd",
                "?",
                "#",
                "é",
                "\ufffd",
                "x" * 3000,
                " ",
                "\\",
            ),
        ]
    ),
    max_size=5,
).map(lambda parts: "/" + "".join(parts))


def dumped(document: Any) -> bytes:
    """JSON as a careless writer has it: NaN by name, surrogates escaped."""
    return json.dumps(document).encode()
