"""A model's tokenizer as one archive, for gateways that tokenise themselves."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHUNK_BYTES = 64 * 1024

_NAMES = (
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file in memory."""

    data: bytes
    sha256: str  # hexadecimal

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Its bytes in pieces; the last one comes with the digest, the others with an empty text."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            yield self.data[start:end], self.sha256 if end >= len(self.data) else ""


@cache
def archive(folder: Path) -> Archive:
    """Pack the files of a checkpoint's folder that concern text; no weights, and no links that lead out of
    it. Takes some 100 ms, once."""
    files = {folder / name for name in _NAMES if (folder / name).is_file()}
    files |= {file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()}
    files = {file for file in files if _is_of(file, folder)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(files):
            target.write(file, file.name)
    data = packed.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def _is_of(file: Path, folder: Path) -> bool:
    """Whether a file is the checkpoint's own: a link may lead to anything that this process may read.

    In the hub's cache every file of ``snapshots/REVISION`` is a link into ``blobs`` beside it.
    """
    home, found = folder.resolve(), file.resolve()
    return found.is_relative_to(home) or (
        home.parent.name == "snapshots" and found.parent == home.parent.parent / "blobs"
    )
