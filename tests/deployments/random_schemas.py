"""Random JSON schemas whose values are short: objects, arrays, enumerations, numbers, text, nesting."""

import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "age", "city", "tags", "is_open", "price", "next", "größe", "a b", 'quote"d')


def random_schema(seed: int, depth: int = 3) -> Schema:
    """An object, always the same for a seed, with objects and arrays in it down to a depth."""
    return _object(random.Random(seed), depth)


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_integer, _number, _text, _choice, _flag, _nothing]
    if depth > 0:
        makers += [_object, _array, _either]
    return rng.choice(makers)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth), _any(rng, depth)]}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"enum": [round(rng.uniform(-9, 9), 2) for _ in range(3)]}


def _text(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,6}$", r"^\d{3}-\d{2}$", "^(red|blue)$"])}
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "green", "a\nb", "", 7, True, None, "Zürich"], rng.randint(1, 4))}


def _flag(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nothing(rng: random.Random, depth: int) -> Schema:
    return {"type": "null"}
