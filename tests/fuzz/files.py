"""Small checkpoints in a folder that is used over and over: one file of it is replaced by each input."""

import atexit
import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from dflash_core.pair import DRAFTER, TARGET

# The embedded pair's shapes without its data: reading and checking a checkpoint takes headers alone.
_COPIED = ("config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def fresh_folder() -> Path:
    """An empty folder, gone when the process ends."""
    made = Path(tempfile.mkdtemp(prefix="dflash-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def folder(source: Path) -> Path:
    """A copy of a checkpoint in which anything may be overwritten; its weights are holes."""
    copy = fresh_folder()
    for name in _COPIED:
        if (source / name).is_file():
            (copy / name).write_bytes((source / name).read_bytes())
    for shard in source.glob("model*.safetensors"):
        write_hollow(copy / shard.name, header(shard), size(shard))
    return copy


def target() -> Path:
    """The embedded target's copy."""
    return folder(TARGET)


def drafter() -> Path:
    """The embedded drafter's copy."""
    return folder(DRAFTER)


@cache
def tokenizer() -> Path:
    """A folder with a small tokenizer of the embedded one's make."""
    copy = fresh_folder()
    (copy / "tokenizer.json").write_text(json.dumps(small_tokenizer()), encoding="utf-8")
    return copy


def config(source: Path) -> dict[str, Any]:
    """A checkpoint's config."""
    return json.loads((source / "config.json").read_text(encoding="utf-8"))


def header(file: Path) -> dict[str, Any]:
    """The header of a file of weights."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(length))


def size(file: Path) -> int:
    """How many bytes of data it has."""
    return max(entry["data_offsets"][1] for name, entry in header(file).items() if name != "__metadata__")


def write_hollow(path: Path, head: Any, num_bytes: int) -> None:
    """Write a safetensors file whose data takes no room on disk."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + num_bytes)


@cache
def small_tokenizer() -> dict[str, Any]:
    """The embedded tokenizer with its first hundreds of tokens."""
    document = json.loads((TARGET / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    added = {token["content"] for token in document["added_tokens"]}
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 320 or token in added}
    model["merges"] = [
        merge
        for merge in model["merges"]
        if all(part in model["vocab"] for part in (*_pair(merge), "".join(_pair(merge))))
    ]
    return document


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
