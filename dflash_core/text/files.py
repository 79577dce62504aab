"""What a checkpoint's JSON files say about text: end tokens, template sources, template variables."""

import json
from pathlib import Path
from typing import Any, cast

from dflash_core.errors import CheckpointError

_TOKEN_VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return cast(dict[str, Any], value)


def eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Every id that ends a turn: Qwen names different ones in different files, and all of them end it."""
    config = read_json(folder / "config.json")
    sources = [
        tokenizer_eos,
        config.get("eos_token_id"),
        (config.get("text_config") or {}).get("eos_token_id"),
        read_json(folder / "generation_config.json").get("eos_token_id"),
    ]
    ids: set[int] = set()
    for source in sources:
        values = cast(list[object], source) if isinstance(source, list) else [source]
        ids.update(value for value in values if isinstance(value, int))
    return frozenset(ids)


def template_variables(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of ``tokenizer_config.json``, which templates may print."""
    variables: dict[str, str] = {}
    for name in _TOKEN_VARIABLES:
        token: object = config.get(name)
        if isinstance(token, dict):
            token = cast(dict[str, object], token).get("content")
        if isinstance(token, str):
            variables[name] = token
    return variables


def template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; a ``chat_template.jinja`` goes before ``tokenizer_config.json``."""
    file = folder / "chat_template.jinja"
    source: object = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    try:
        named = cast(list[dict[str, str]], source)
        return {entry["name"]: entry["template"] for entry in named}
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: chat_template: expected a string or a list of name and template"
        ) from None
