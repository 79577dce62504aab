"""What a checkpoint's JSON files say about text: end tokens, template sources, template variables."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from dflash_core.checkpoints.fields import is_integer, show
from dflash_core.checkpoints.json_file import read_loose_json, read_plain_text
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
    return read_loose_json(path) if path.exists() else {}


def eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Every id that ends a turn: Qwen names different ones in different files, and all of them end it."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    sources = [
        tokenizer_eos,
        config.get("eos_token_id"),
        cast(dict[str, object], inner).get("eos_token_id") if isinstance(inner, dict) else None,
        read_json(folder / "generation_config.json").get("eos_token_id"),
    ]
    return frozenset(token for source in sources for token in _ids(source, folder))


def _ids(source: object, folder: Path) -> Iterable[int]:
    for value in cast(list[object], source) if isinstance(source, list) else [source]:
        if is_integer(value) and value >= 0:
            yield value
        elif value is not None:
            raise CheckpointError(f'{folder}: "eos_token_id" is {show(source)}; expected token ids')


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
    source: object = read_plain_text(file) if file.exists() else config.get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    named = cast(list[object], source) if isinstance(source, list) else []
    templates: dict[str, str] = {}
    for entry in named:
        fields = cast(dict[str, object], entry if isinstance(entry, dict) else {})
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            break
        templates[name] = template
    if not templates or len(templates) < len(named):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: chat_template: expected a string or a list of name and template"
        )
    return templates
