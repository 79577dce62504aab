"""Runs one client's script and reads the checks that it prints."""

import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.conformance.server import Server


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a client tried."""

    name: str
    is_good: bool
    detail: str = ""


@dataclass(slots=True)
class Outcome:
    """What a client did."""

    name: str
    checks: list[Check] = field(default_factory=list)
    missing: str | None = None  # why it is not installed

    @property
    def is_good(self) -> bool:
        """Whether it ran and every check held. A client that could not be installed says nothing of us."""
        return self.missing is not None or (bool(self.checks) and all(c.is_good for c in self.checks))

    def line(self) -> str:
        """One line for whoever watches."""
        if self.missing is not None:
            return f"{self.name}: not installed ({self.missing})"
        bad = [f"{check.name} ({check.detail})" for check in self.checks if not check.is_good]
        return f"{self.name}: {len(self.checks) - len(bad)} of {len(self.checks)} passed {'; '.join(bad)}"

    def json(self) -> dict[str, object]:
        """For the report."""
        return asdict(self)


def play(name: str, command: list[str], server: Server, folder: Path, timeout_s: float) -> Outcome:
    """Run the script in its folder; its own output stays there."""
    environment = os.environ | {
        "CONFORMANCE_URL": server.url,
        "CONFORMANCE_MODEL": server.model,
        "CONFORMANCE_TARGET": str(server.target),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    environment.pop("PYTHONPATH", None)
    log = folder / "output.log"
    outcome = Outcome(name)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            outcome.checks.append(Check("in time", False, f"not over after {timeout_s:g} s"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    outcome.checks[:0] = [check for line in output.splitlines() if (check := _read(line)) is not None]
    if process.returncode not in (0, -signal.SIGKILL):
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        outcome.checks.append(Check("exit", False, f"code {process.returncode}: {' '.join(last)}"[:300]))
    return outcome


def _read(line: str) -> Check | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or "check" not in said:
        return None
    return Check(said["check"], bool(said["ok"]), str(said.get("detail", ""))[:300])
