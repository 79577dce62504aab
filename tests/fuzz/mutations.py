"""Files with a field or a byte amiss."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.strategies import Strategy, anything

# What a number, a string, a list or an object of a file may turn into.
_ODD = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**12, 10**19, 10**30, 1e308, 1e-320, 0.5, "", "7", "gelu",
    "\x1b[2J", "../../etc/passwd", "/etc/passwd", [], [[]], [-1], [10**12] * 3, [10**19] * 400, {},
    {"a": {}}, "x" * 5000,
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, item in items:
        if len(found) < 500:
            found += _places(item, (*path, key))
    return found


def mutated(document: Mapping[str, Any]) -> Strategy:
    """The JSON document with one to three places changed, dropped or doubled under another name."""
    places = _places(document)
    change = st.tuples(
        st.sampled_from(places), st.sampled_from(["set", "drop", "double"]), st.sampled_from(_ODD) | anything
    )

    def apply(changes: Sequence[tuple[tuple[Any, ...], str, Any]]) -> dict[str, Any]:
        changed = copy.deepcopy(dict(document))
        for path, kind, value in changes:
            _change(changed, path, kind, value)
        return changed

    return st.lists(change, min_size=1, max_size=3).map(apply)


def _change(document: Any, path: tuple[Any, ...], kind: str, value: Any) -> None:
    holder = document
    try:
        for key in path[:-1]:
            holder = holder[key]
        if kind == "drop":
            del holder[path[-1]]
        elif kind == "double" and isinstance(holder, dict):
            holder[str(value)[:20]] = holder[path[-1]]
        else:
            holder[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        return  # an earlier change took the place away


def spoiled(data: bytes) -> Strategy:
    """The bytes cut, with some overwritten, or with some put in."""
    place = st.integers(0, max(len(data) - 1, 0))
    few = st.binary(min_size=1, max_size=8)
    over = st.builds(lambda at, new: data[:at] + new + data[at + len(new) :], place, few)
    more = st.builds(lambda at, new: data[:at] + new + data[at:], place, few)
    return place.map(lambda at: data[:at]) | over | more
