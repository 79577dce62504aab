"""A checkpoint's chat template, rendered in Jinja's sandbox as ``transformers`` renders it.

Own, because ``transformers`` takes seconds to import and offers no way in that keeps a client's
``chat_template`` argument out of the renderer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.text.messages import Message
from dflash_core.text.sandbox import Budget, LimitedEnvironment, limited

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
_MAX_SOURCE = 2**20  # characters; the longest in use have some ten thousand


class ChatTemplate:
    """Messages to prompt text. Holds one template, or several by name (``default``, ``tool_use``)."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]):
        environment = _environment()
        self._templates = {name: _compile(environment, text) for name, text in sources.items()}
        self._variables = dict(variables)  # bos_token, eos_token, ...: templates may print them
        self.source = "\n".join(sources.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        budget: Budget | None = None,
    ) -> str:
        """Return the prompt's text; whatever the template raises becomes ``InvalidRequest``, as does one
        that uses up its ``budget``."""
        for name in extra:
            if name in _OWN_VARIABLES or name in self._variables:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} is not free", param="chat_template_kwargs"
                )
        context = {
            "documents": None,
            **self._variables,
            **extra,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with limited(budget or Budget()):
                return self._pick(tools).render(context)
        except TemplateError as error:
            raise InvalidRequest(f"messages: the chat template says: {error}", param="messages") from None
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ):
            raise InvalidRequest(
                "messages: the chat template cannot render these; check roles, contents and tool calls",
                param="messages",
            ) from None

    def _pick(self, tools: Sequence[Message] | None) -> Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("this model has no chat template; use plain completions", param="messages")
        return self._templates[name]


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(environment: LimitedEnvironment, source: str) -> Template:
    if len(source) > _MAX_SOURCE:
        raise CheckpointError(f"chat template: {len(source)} characters; expected at most {_MAX_SOURCE}")
    try:
        with limited(Budget()):
            return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # Jinja and Python's own compiler, fed with a stranger's text
        raise CheckpointError(f"chat template: cannot be compiled ({type(error).__name__})") from error


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
