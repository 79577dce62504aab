"""``make fuzz MINUTES=10``: hostile inputs at every parser; prints how many were tried and what was found.

Hypothesis plays every property. Where atheris is installed (it has wheels for Linux alone) the parsers of
bytes are also fuzzed by coverage. Each runs in a process of its own, so that a crash is a finding too.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from tests.fuzz.properties import properties, seeds

_COUNTS = (
    re.compile(r"^tried (\d+)", re.M),
    re.compile(r"^Done (\d+) runs", re.M),
    re.compile(r"^#(\d+)", re.M),
)
_GRACE_S = 240.0  # a start on a busy machine, and an input that takes long


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave."""

    name: str
    engine: str
    num_tried: int
    finding: str | None  # the end of its trace


def main() -> None:
    """Share the time out over the properties; the exit code is 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", nargs="*", help="names of properties")
    asked = parser.parse_args()
    names = asked.only or list(properties())
    runs = [(name, "hypothesis") for name in names]
    if importlib.util.find_spec("atheris") is not None:
        runs += [(name, "atheris") for name in seeds() if name in names]
    else:
        print("fuzz: atheris is not installed, Hypothesis alone", flush=True)
    seconds = max(1.0, asked.minutes * 60 / len(runs))
    outcomes = [_run(name, engine, seconds) for name, engine in runs]
    found = [outcome for outcome in outcomes if outcome.finding is not None]
    total = sum(outcome.num_tried for outcome in outcomes)
    print(f"fuzz: {total} inputs tried by {len(outcomes)} runs, {len(found)} findings")
    for outcome in found:
        print(f"\n{outcome.name} ({outcome.engine})\n{outcome.finding}")
    sys.exit(bool(found))


def _run(name: str, engine: str, seconds: float) -> Outcome:
    command = [sys.executable, "-m", "tests.fuzz.one", name, engine, str(seconds)]
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-fuzz-") as folder:  # a fuzzer ends without a farewell
            done = subprocess.run(
                command,
                capture_output=True,
                timeout=seconds + _GRACE_S,
                check=False,
                env={**os.environ, "TMPDIR": folder},
            )
        output, code = (done.stdout + done.stderr).decode(errors="replace"), done.returncode
    except subprocess.TimeoutExpired as late:
        output = ((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace") + "\nit hangs"
        code = -1
    outcome = Outcome(name, engine, _count(output), None if code == 0 else output[-3000:])
    print(
        f"{name:20} {engine:10} {outcome.num_tried:9} {'found something' if code else 'nothing'}", flush=True
    )
    return outcome


def _count(output: str) -> int:
    for pattern in _COUNTS:
        if found := pattern.findall(output):
            return int(found[-1])
    return 0


if __name__ == "__main__":
    main()
