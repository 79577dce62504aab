"""The page and its files, as they lie in ``static``: no build step, nothing from outside."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"
ROOT = "/console"

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# The page needs its own files and this server's routes. Whatever else a fault might put into it stays dead.
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is sent."""

    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "File":
        """Read a file; its tag changes with its bytes."""
        body = path.read_bytes()
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        return cls(body, {**HEADERS, "content-type": _MEDIA_TYPES[path.suffix], "etag": tag})


def _route(name: str) -> str:
    return ROOT if name == PAGE else f"{ROOT}/{name}"


FILES: Mapping[str, File] = {_route(path.name): File.read(path) for path in sorted(STATIC.iterdir())}
"""Route to file."""

PATHS = (*FILES, f"{ROOT}/", "/")
"""Routes that need no key: they hold nothing of this server's."""
