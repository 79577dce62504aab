"""Locust: some users who chat for a while, streamed."""

import csv
import subprocess
import sys
from pathlib import Path

from checks import URL, check

SECONDS, USERS = 20, 8


@check(f"{USERS} users for {SECONDS} s without a failure")
def _():
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(Path(__file__).parent / "locustfile.py"),
        "--headless",
    ]
    command += ["-u", str(USERS), "-r", str(USERS), "-t", f"{SECONDS}s", "--host", URL, "--csv", "load"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    print(run.stdout[-4000:], run.stderr[-4000:], file=sys.stderr)
    with open("load_stats.csv") as file:
        (total,) = [row for row in csv.DictReader(file) if row["Name"] == "Aggregated"]
    assert int(total["Request Count"]) > 0, "no request was made"
    assert int(total["Failure Count"]) == 0, f"{total['Failure Count']} of {total['Request Count']} failed"
    assert run.returncode == 0, f"exit code {run.returncode}"
    return f"{total['Request Count']} chats, median {total['Median Response Time']} ms"
