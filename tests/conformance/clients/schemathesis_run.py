"""Schemathesis makes up requests by our OpenAPI document: none may end in a fault of the server."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import URL, check

HOOKS = Path(__file__).parent
COUNTS = Path("counts.json")
MOST, MOST_S = 150, 240  # examples of each operation, and seconds for all of them


def _run() -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{URL}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", str(MOST), "--seed", "1"]
    command += ["--request-timeout", "60", "--phases", "coverage,fuzzing", "--workers", "2"]
    command += ["--max-time", str(MOST_S)]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HOOKS)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-6000:], run.stderr[-2000:], file=sys.stderr)
    return run


@check("no fault of the server in 1,000 cases")
def _():
    COUNTS.unlink(missing_ok=True)
    run = _run()
    counts = json.loads(COUNTS.read_text())
    statuses = {}
    for name, count in counts.items():
        status = name.rpartition(" ")[2]
        statuses[status] = statuses.get(status, 0) + count
    print(json.dumps(counts, indent=1), file=sys.stderr)
    faults = {name: count for name, count in counts.items() if name.rpartition(" ")[2].startswith("5")}
    assert not faults, faults
    assert run.returncode == 0, run.stdout[-300:]
    assert sum(counts.values()) >= 1000, f"only {sum(counts.values())} cases"
    return f"{sum(counts.values())} cases: " + ", ".join(f"{s}: {n}" for s, n in sorted(statuses.items()))
