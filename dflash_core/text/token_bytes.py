"""What one token stands for: bytes, which need not be whole characters."""

import re
from functools import cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(token: str | None, *, is_byte_level: bool) -> bytes:
    """Bytes of a token as its vocabulary spells it; none for an id outside the vocabulary."""
    if token is None:  # a model's output is often wider than the vocabulary
        return b""
    if is_byte_level:
        return byte_level_bytes(token)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary, Qwen's for example."""
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token: its text as it stands
        return token.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The table of byte-level vocabularies: printable bytes stand for themselves, others are moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if chr(byte) not in table)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
