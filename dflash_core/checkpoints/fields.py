"""Typed access to a checkpoint's config: every failure names file, key, value and what was expected."""

from collections.abc import Iterator, Mapping
from typing import TypeGuard, cast

from dflash_core.errors import CheckpointError


class Fields:
    """A config object, or a section of one (``prefix`` is then its dotted name). ``null`` is absent."""

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = ""):
        self._values = {key: value for key, value in values.items() if value is not None}
        self.source = source
        self.prefix = prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> object:
        """Return the raw value, None if absent."""
        return self._values.get(key)

    def error(self, key: str, expected: str) -> CheckpointError:
        """Make the error for a key: what was found, what was expected."""
        found = f"is {show(self._values[key])}" if key in self._values else "is missing"
        return CheckpointError(f'{self.source}: "{self.prefix}{key}" {found}; expected {expected}')

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a required integer in ``low .. high``; raises CheckpointError."""
        value = self.get(key)
        if not is_integer(value) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """Return a required number in ``low .. high``; raises CheckpointError."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """Return an optional boolean; raises CheckpointError."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return an optional string; raises CheckpointError."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a required, non-empty list of integers; raises CheckpointError."""
        items = self._items(key, "a list of integers")
        if not items or not all(is_integer(item) for item in items):
            raise self.error(key, "a list of integers")
        return cast(tuple[int, ...], items)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return an optional list of strings; raises CheckpointError."""
        if key not in self:
            return None
        items = self._items(key, "a list of strings")
        if not all(isinstance(item, str) for item in items):
            raise self.error(key, "a list of strings")
        return cast(tuple[str, ...], items)

    def section(self, key: str) -> "Fields":
        """Return a nested object, empty if absent; raises CheckpointError."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(cast(dict[str, object], value), self.source, f"{self.prefix}{key}.")

    def _items(self, key: str, expected: str) -> tuple[object, ...]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.error(key, expected)
        return tuple(cast(list[object], value))


def is_integer(value: object) -> TypeGuard[int]:
    """Tell a JSON integer from a boolean, a float or anything else."""
    return isinstance(value, int) and not isinstance(value, bool)


def holder(key: str, *sections: Fields) -> Fields:
    """Return the first section that has the key, else the last one (whose error then names the key)."""
    for section in sections:
        if key in section:
            return section
    return sections[-1]


def show(value: object) -> str:
    """Write a value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
