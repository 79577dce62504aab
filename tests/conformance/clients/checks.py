"""What the scripts of Python clients share. Knows the standard library alone."""

import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["CONFORMANCE_URL"]
MODEL = os.environ["CONFORMANCE_MODEL"]
TARGET = os.environ["CONFORMANCE_TARGET"]
QUESTION = "What is the capital of France?"
WORD = "Paris"


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """Run the function at once and print how it went; what it returns is the detail."""

    def run(work: Callable[[], object]) -> None:
        try:
            detail, is_good = work() or "", True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            detail, is_good = f"{type(error).__name__}: {error}", False
        say(name, is_good, detail)

    return run


def say(name: str, is_good: bool, detail: object = "") -> None:
    """Print one check."""
    print(json.dumps({"check": name, "ok": is_good, "detail": str(detail)}), flush=True)
