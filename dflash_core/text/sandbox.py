"""Jinja's sandbox with an end: a template comes with a checkpoint, and may be made to hang or to fill memory.

Jinja keeps a template from reaching Python. It does not keep one from ``range`` inside ``range``, from a
macro that calls itself twice, or from doubling a string forty times. So every pass of a loop and every macro
is a *step*, which looks at the clock, and what filters, calls and operators make counts as *characters*. The
few operations that alone could make anything from little are refused before they run.
"""

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS: Final = 10.0  # of one rendering
_MAX_CHARACTERS: Final = 2**26  # made in one rendering, all in all
_MAX_PRODUCT: Final = 2**31  # of the sizes of what one operation multiplies
_MAX_WIDTH: Final = 10_000
_MAX_BITS: Final = 1024  # of a number
_REFERENCE: Final = 8  # characters that an item of a list stands for
_STEP: Final = "_step"

# Filters, and methods of strings, whose result may be as long as the product of their arguments.
_MULTIPLYING: Final = frozenset(
    {
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace"),
        *("rjust", "slice", "tojson", "translate", "wordwrap", "xmlattr", "zfill"),
    }
)
# A width of thousands, or one that comes from an argument: in ``%`` and in ``format``.
_WIDE: Final = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*[:.][^{}]*(\d{4}|\{)")


class TemplateBudgetError(TemplateError):
    """A template would take too long, or make too much."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = clock() + seconds
        self._characters = _MAX_CHARACTERS

    def step(self) -> None:
        """Raise if the time is over."""
        if self._clock() > self._until:
            raise TemplateBudgetError("it takes too long")

    def count(self, value: object) -> None:
        """Count what an operation made; raise if it was too much."""
        self.step()
        if isinstance(value, str | list | tuple):
            room = 1 if isinstance(value, str) else _REFERENCE
            self._characters -= room * len(cast("str | list[object]", value))
            if self._characters < 0:
                raise TemplateBudgetError("it makes too much text")
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise TemplateBudgetError("it makes too large a number")


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(budget: Budget) -> Generator[None]:
    """What is compiled or rendered inside uses this budget."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates end, inside ``limited``."""

    # These go through ``call_binop``, and are not folded while a template is compiled.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.concat = _join_counted  # type: ignore[method-assign]
        self.globals.pop("lipsum", None)  # text from nothing, of any length
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters[_STEP] = _step

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, counted as the others are."""
        self.filters[name] = _counted(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            cast(Any, node).body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), _STEP)))
        for node in list(tree.find_all(nodes.Concat)):
            # ``~`` is compiled to a bare join; as a filter it is counted.
            node.nodes = [_filtered(nodes.List(node.nodes), "join")]
        for node in tree.find_all(nodes.Node):
            if cast(Any, node).lineno is None:
                node.set_lineno(1)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call what a template calls, unless that could get out of hand."""
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, str) and name in _MULTIPLYING:
            args = _listed(args)
            _check(name, [owner, *args, *kwargs.values()])
        return _made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do what an operator does, unless that could get out of hand."""
        if operator == "**" and _bits(left) * _times(right) > _MAX_BITS:
            raise TemplateBudgetError("it makes too large a number")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            _check_product([_size(left), _size(right)])
        if operator == "%" and isinstance(left, str):
            _check("format", [left, right])
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Let ``call`` know whose ``format`` it calls."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            wrapped.__self__ = value.__self__  # type: ignore[attr-defined]
        return wrapped


def _made(value: Any) -> Any:
    budget = _budget.get()
    if budget is not None:
        budget.count(value)
    return value


@pass_context  # or it would be folded away
def _step(_context: Context, value: Any) -> Any:
    return _made(value)


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with the mark that says what the first argument is
    def counted(*args: Any, **kwargs: Any) -> Any:
        if name in _MULTIPLYING:
            args = _listed(args)
            _check(name, [*args, *kwargs.values()])
        return _made(function(*args, **kwargs))

    return counted


def _join_counted(parts: Iterable[str]) -> str:
    """Join what a template writes, counting as it comes."""
    return "".join(_made(part) for part in parts)


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with iterators read, counting as they come: their sizes are to be known."""
    return tuple(
        [_made(item) for item in value] if isinstance(value, Iterator) else value for value in values
    )


def _check(name: str, values: list[Any]) -> None:
    """Refuse one of the multiplying operations with arguments that would make too much."""
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) == 3:  # what is looked for makes nothing longer
        texts = [texts[0], texts[2]]
    widths = [value for value in values if isinstance(value, int)]
    if max(widths, default=0) > _MAX_WIDTH and name not in ("format", "replace"):
        raise TemplateBudgetError("it pads to too great a width")
    if name.startswith("format") and _WIDE.search(texts[0] if texts else ""):
        raise TemplateBudgetError("it formats to too great a width")
    others = [_size(value) for value in values if not isinstance(value, str | int)]
    _check_product([*map(len, texts), *others, *(widths if name != "format" else ())])


def _check_product(sizes: Iterable[int]) -> None:
    product = 1
    for size in sizes:
        product *= max(1, size)
    if product > _MAX_PRODUCT:
        raise TemplateBudgetError("it makes too much text")


def _size(value: object) -> int:
    """How many characters or items a value may contribute."""
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return len(items) + sum(len(item) for item in items if isinstance(item, str))
    return len(value) if isinstance(value, Sized) else 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _times(value: object) -> int:
    return max(1, abs(value)) if isinstance(value, int) else 1
