"""Bearer keys, for HTTP and gRPC alike: read from a file, kept as digests."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from deployments.openai.errors import InvalidApiKey
from deployments.settings import Settings


class KeyRing:
    """Lets callers in that name one of the keys. Keeps digests only, compares all in constant time."""

    def __init__(self, keys: Iterable[str]):
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        """Whether there is any key."""
        return bool(self._digests)

    def check(self, authorization: bytes) -> str:
        """Return the id of the key in the value of ``authorization``: its place, ``key-1`` for the first.

        Raise ``InvalidApiKey`` unless it is ``Bearer`` and one of the keys. The id is not made from the key:
        a digest in a log would let it be guessed.
        """
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise InvalidApiKey(
                "Incorrect API key." if key else "No API key: send 'authorization: Bearer KEY'."
            )
        return f"key-{matches.index(True) + 1}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def keys_of(settings: Settings) -> tuple[str, ...]:
    """Every key that the settings name, in their file or themselves."""
    return (*(key.get_secret_value() for key in settings.api_keys), *read_keys(settings.api_keys_file))


def read_keys(file: Path | None) -> tuple[str, ...]:
    """One key a line; empty lines and lines that start with # do not count. No file: no keys."""
    if file is None:
        return ()
    lines = file.read_text(encoding="utf-8").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ValueError("the file of API keys has no key in it")
    return keys
