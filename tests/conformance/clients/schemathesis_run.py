"""Schemathesis makes up requests by our OpenAPI document: none may end in a fault of the server."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import URL, check

HOOKS = Path(__file__).parent
COUNTS = Path("counts.json")
ROUNDS = (120, 300)  # examples of each operation; more if the first were too few


@check("no fault of the server in 1,000 cases")
def _():
    COUNTS.unlink(missing_ok=True)
    total = {}
    for seed, most in enumerate(ROUNDS):
        run = _run(seed, most)
        for name, count in json.loads(COUNTS.read_text()).items():
            total[name] = total.get(name, 0) + count
        if run.returncode != 0 or sum(total.values()) >= 1000:
            break
    statuses = {}
    for name, count in total.items():
        statuses[name.rpartition(" ")[2]] = statuses.get(name.rpartition(" ")[2], 0) + count
    print(json.dumps(total, indent=1), file=sys.stderr)
    faults = {name: count for name, count in total.items() if name.rpartition(" ")[2].startswith("5")}
    assert not faults, faults
    assert run.returncode == 0, run.stdout[-300:]
    assert sum(total.values()) >= 1000, f"only {sum(total.values())} cases"
    return f"{sum(total.values())} cases: " + ", ".join(f"{s}: {n}" for s, n in sorted(statuses.items()))


def _run(seed: int, most: int) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{URL}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", str(most), "--seed", str(seed)]
    command += ["--request-timeout", "60", "--phases", "examples,coverage,fuzzing", "--workers", "2"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HOOKS)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-6000:], run.stderr[-2000:], file=sys.stderr)
    return run
