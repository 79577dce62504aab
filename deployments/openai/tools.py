"""Tool calls: how this model writes them, and what of a client's wish can be kept.

Formats and parsers are mlx-lm's. A client may leave the call to the model; where it asks for one,
``forcing`` writes the grammar of the calls that may come.
"""

import importlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from deployments.generation import Tokenizer
from deployments.openai.arguments import typed
from deployments.openai.schema import ChatRequest, ChosenTool
from dflash_core.errors import InvalidRequest

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the model wrote."""

    name: str
    arguments: str  # a JSON object
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What stands around a call in a model's text, and what reads the text between."""

    name: str  # of mlx-lm's parser
    start: str
    end: str  # empty: a call goes on to the end of the answer
    parse: Callable[[str, Sequence[Tool]], Any]


@dataclass(frozen=True, slots=True)
class Calling:
    """How to find calls in an answer."""

    format: ToolFormat
    tools: tuple[Tool, ...]
    is_parallel: bool = True  # otherwise only the first call is told

    def read(self, text: str) -> list[Call]:
        """Return the calls in ``text``, which stood between the markers; raises ``ValueError``."""
        try:
            parsed = self.format.parse(text, self.tools)
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
            return [self._typed(call) for call in calls] if self.format.name == UNTYPED else calls
        except Exception as error:  # a parser of somebody else's, fed with whatever a model wrote
            raise ValueError(f"not a tool call: {error}") from error

    def _typed(self, call: Call) -> Call:
        schema = next(
            (
                tool["function"].get("parameters")
                for tool in self.tools
                if tool["function"]["name"] == call.name
            ),
            None,
        )
        if not schema:
            return call
        arguments = typed(json.loads(call.arguments), schema)
        return replace(call, arguments=json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _call(parsed: Mapping[str, Any]) -> Call:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as text
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("expected a name and an object of arguments")
    return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def calling_of(request: ChatRequest, tokenizer: Tokenizer) -> Calling | None:
    """Return how to find the calls that ``request`` allows, None for none; raises ``InvalidRequest``."""
    check_choice(request)
    if not request.tools or request.tool_choice == "none":
        return None
    format_ = tool_format(tokenizer.chat_template, tokenizer.tool_parser_type)
    if format_ is None or not tokenizer.special_ids.isdisjoint(tokenizer.encode(format_.start)):
        raise InvalidRequest(
            "This model's chat template has no tool calls that this server can read; leave 'tools' out.",
            param="tools",
            code="unsupported_parameter",
        )
    tools = tuple(tool.model_dump(exclude_none=True) for tool in request.tools)
    return Calling(format_, tools, request.parallel_tool_calls is not False)


def check_choice(request: ChatRequest) -> None:
    """Raise unless the call that ``request`` asks for is one of a tool that it offers."""
    choice, offered = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if choice == "required" and not offered:
        problem = "'tool_choice' is 'required', but there are no 'tools'."
    elif isinstance(choice, ChosenTool) and choice.function.name not in offered:
        problem = "'tool_choice' names a function that is not among the 'tools'."
    else:
        return
    raise InvalidRequest(problem, param="tool_choice", code="invalid_value")


UNTYPED = "qwen3_coder"  # writes arguments as bare text, and its parser guesses what they are

# What Qwen's templates write, and whose parser reads it; the first that is there counts. Other checkpoints
# name their parser, as mlx-lm's own conversions do.
_SIGNS = (
    (("<tool_call>\\n<function=",), UNTYPED),
    (("<tool_call>\n<function=",), UNTYPED),
    (("<tool_call>", "tool_call.name"), "json_tools"),
)


@lru_cache(maxsize=8)
def tool_format(template: str, named: str | None = None) -> ToolFormat | None:
    """Return mlx-lm's format for a chat template; ``named`` by the checkpoint goes first."""
    found = named or next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), None)
    if found is None or not found.isidentifier():
        return None
    try:
        module = importlib.import_module(f"{_parsers()}.{found}")
    except ModuleNotFoundError:
        return None
    parse = cast(Callable[[str, Sequence[Tool]], Any], module.parse_tool_call)
    return ToolFormat(found, module.tool_call_start, module.tool_call_end, parse)


def _parsers() -> str:
    """Name of the package of mlx-lm's parsers.

    Under a name of its own: as a part of mlx-lm it would bring MLX and transformers into a process that
    has no use for them, and take seconds.
    """
    name = "_mlx_lm_tool_parsers"
    if name not in sys.modules:
        library = importlib.util.find_spec("mlx_lm")  # finds, imports nothing
        if library is None or not library.submodule_search_locations:
            raise ImportError("mlx-lm is not installed")
        package = ModuleType(name)
        package.__path__ = [str(Path(library.submodule_search_locations[0]) / "tool_parsers")]
        sys.modules[name] = package
    return name
