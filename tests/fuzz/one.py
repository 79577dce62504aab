"""``python -m tests.fuzz.one NAME ENGINE SECONDS``: try inputs on one property until the time is over.

Prints how many were tried; a finding is a trace and an exit code that is not 0.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

# Coverage is counted in what is imported from here on.
INSTRUMENTED = [
    "deployments.openai",
    "deployments.prompts",
    "deployments.rpc",
    "deployments.jobs",
    "dflash_core.checkpoints",
    "dflash_core.text",
]
_BATCH = 200
_WORDS = re.compile(rb"\w{3,}")


def main() -> None:
    """Read the arguments, and go."""
    name, engine, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if engine == "atheris":
        _atheris(name, seconds)
    else:
        _hypothesis(name, seconds)


def _hypothesis(name: str, seconds: float) -> None:
    """Batches of examples, each with a seed of its own, none of them remembered."""
    from hypothesis import given, seed, settings

    from tests.fuzz.properties import UNHURRIED, properties

    chosen = properties()[name]
    num_tried = 0

    def check(value: object) -> None:
        nonlocal num_tried
        num_tried += 1
        chosen.check(value)

    until, number = time.monotonic() + seconds, time.time_ns()
    try:
        while time.monotonic() < until:
            number += 1
            trial = settings(
                max_examples=_BATCH, deadline=None, database=None, suppress_health_check=UNHURRIED
            )(given(chosen.inputs)(check))
            seed(number)(trial)()
    finally:
        print(f"tried {num_tried}", flush=True)


def _atheris(name: str, seconds: float) -> None:
    """Mutations that libFuzzer keeps where they reach new code; it ends the process itself."""
    import atheris

    # Its stubs leave this one out.
    with atheris.instrument_imports(include=INSTRUMENTED):  # type: ignore[attr-defined]
        from tests.fuzz.properties import properties, seeds

    check = properties()[name].check
    with tempfile.TemporaryDirectory(prefix="dflash-fuzz-") as folder:
        corpus, words = Path(folder) / "corpus", Path(folder) / "words"
        corpus.mkdir()
        for number, data in enumerate(seeds()[name]):
            (corpus / f"seed-{number}").write_bytes(data)
        known = {word.decode() for data in seeds()[name] for word in _WORDS.findall(data)}
        words.write_text("".join(f'"{word}"\n' for word in sorted(known)))
        options = [f"-max_total_time={seconds:.0f}", "-max_len=4096", "-timeout=60", "-rss_limit_mb=4096"]
        options += [f"-dict={words}", f"-artifact_prefix={folder}/"]
        atheris.Setup(["fuzz", *options, str(corpus)], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
