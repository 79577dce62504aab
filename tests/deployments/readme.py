"""The README's commands and programs, for tests that type them."""

import re

from tests.deployments.conftest import ROOT

_FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def readme(language: str, word: str) -> str:
    """The README's block in this language with this word."""
    blocks = _FENCES.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return next(text for tag, text in blocks if tag == language and word in text)
