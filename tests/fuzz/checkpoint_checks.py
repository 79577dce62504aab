"""What must hold for the files of a checkpoint: a spec, an array, a text, or one clear refusal."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2.utils import Cycler

from dflash_core.checkpoints import TargetSpec, read_drafter_spec, read_target_spec
from dflash_core.checkpoints.json_file import parse_json_object
from dflash_core.checkpoints.safetensors_header import read_header
from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.text import Tokenizer
from dflash_core.text.sandbox import Budget
from dflash_core.text.template import ChatTemplate
from tests.deployments.http_stub import tokenizer
from tests.fuzz import files, strategies
from tests.fuzz.job_checks import scratch

WEIGHTS = DRAFTER / "model.safetensors"


def json_file(data: bytes) -> None:
    """Any bytes as a checkpoint's JSON."""
    _refused_clearly(parse_json_object, data, "config.json")


def target_config(document: Any) -> None:
    """A target's config with something amiss."""
    (files.target() / "config.json").write_bytes(strategies.dumped(document))
    _refused_clearly(read_target_spec, files.target())


def drafter_config(document: Any) -> None:
    """A drafter's config with something amiss."""
    (files.drafter() / "config.json").write_bytes(strategies.dumped(document))
    _refused_clearly(lambda: read_drafter_spec(files.drafter(), target_spec()))


def safetensors_header(head: Any) -> None:
    """A header with something amiss, over data of the right size."""
    path = scratch() / "model.safetensors"
    files.write_hollow(
        path, head if isinstance(head, bytes) else strategies.dumped(head), files.size(WEIGHTS)
    )
    _refused_clearly(read_header, path)


def safetensors_bytes(data: bytes) -> None:
    """Any bytes as weights."""
    path = scratch() / "any.safetensors"
    path.write_bytes(data)
    _refused_clearly(read_header, path)


def weight_index(document: Any) -> None:
    """An index of shards that leads anywhere."""
    file = files.drafter() / "model.safetensors.index.json"
    file.write_bytes(strategies.dumped(document))
    (files.drafter() / "config.json").write_bytes((DRAFTER / "config.json").read_bytes())
    try:
        _refused_clearly(lambda: read_drafter_spec(files.drafter(), target_spec()))
    finally:
        file.unlink()


def tokenizer_file(document: Any) -> None:
    """A tokenizer with something amiss, which must encode and decode if it loads."""
    folder = files.tokenizer()
    (folder / "tokenizer.json").write_bytes(
        document if isinstance(document, bytes) else strategies.dumped(document)
    )

    def use() -> None:
        loaded = Tokenizer.load(folder)
        loaded.require_within(400)
        loaded.decode(loaded.encode("Hello, <|im_end|> 日本"))

    _refused_clearly(use)


def text_config(document: Any) -> None:
    """A ``tokenizer_config.json`` of any content."""
    folder = files.tokenizer()
    (folder / "tokenizer.json").write_text(json.dumps(files.small_tokenizer()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes(strategies.dumped(document))
    _refused_clearly(lambda: Tokenizer.load(folder).apply_chat([{"role": "user", "content": "Hi"}]))


def template(source: str) -> None:
    """A template that does what it likes ends, in text or in a refusal."""
    try:
        made = ChatTemplate({"default": source}, {})
        text = made.render([{"role": "user", "content": "Hi"}], None, True, {}, Budget(seconds=0.2))
    except (CheckpointError, InvalidRequest):
        return
    assert "<class" not in text.replace(str(Cycler), "")  # which Jinja gives to every template


def conversation(messages: Any) -> None:
    """Whatever is said, control tokens are those of the same conversation with nothing in it."""
    ours = tokenizer()
    try:
        ids = ours.apply_chat(messages)
    except InvalidRequest:
        return
    twin = ours.apply_chat([_bland(message) for message in messages])
    assert _control(ids, ours) == _control(twin, ours)


def _bland(message: Any) -> Any:
    if isinstance(message, dict):
        return {key: value if key in ("role", "type") else _bland(value) for key, value in message.items()}
    if isinstance(message, list):
        return [_bland(item) for item in message]
    return "x" if isinstance(message, str) else message


def _control(ids: list[int], ours: Tokenizer) -> list[int]:
    return [token for token in ids if token in ours.special_ids]


def _refused_clearly(work: Callable[..., object], *arguments: object) -> None:
    message = ""
    try:
        work(*arguments)
    except CheckpointError as error:
        message = str(error)
    except InvalidRequest:  # a template that can be compiled and not be rendered
        return
    assert len(message) <= 2100
    assert message.replace("\n", "") == "" or message.replace("\n", "").isprintable()


@cache
def target_spec() -> TargetSpec:
    """What the drafter is held against."""
    return read_target_spec(TARGET)
