"""An environment of its own for each client: packages of one would not always suit another."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conformance.table import Client

CLIENTS_FOLDER = Path(__file__).parent / "clients"
INSTALL_TIMEOUT_S = 900.0


class NotInstalled(Exception):
    """A registry did not give the packages, or the machine cannot hold them."""


def install(client: Client, folder: Path, uv: str) -> list[str]:
    """Make the environment, unless it is there; returns the command of the client's script."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = client.python or client.npm
    done = folder / ".installed"
    wanted = "\n".join(packages)
    if not done.exists() or done.read_text() != wanted:
        if client.npm:
            _npm(client, folder)
        else:
            _python(client, folder, uv)
        done.write_text(wanted)
    script = CLIENTS_FOLDER / client.script
    if not client.npm:
        return [str((folder / "venv/bin/python").absolute()), str(script)]
    # Modules are looked for beside the script that imports them.
    for file in (script, CLIENTS_FOLDER / "checks.mjs"):
        shutil.copy(file, folder)
    return ["node", str((folder / client.script).absolute())]


def _python(client: Client, folder: Path, uv: str) -> None:
    venv, python = folder / "venv", str(folder / "venv/bin/python")
    if shutil.which(uv):
        _run([uv, "venv", "--clear", "--seed", "--python", sys.executable, str(venv)])
        try:
            _run([uv, "pip", "install", "--python", python, *client.python])
            return
        except NotInstalled:  # uv knows nothing of an index that pip is pointed at
            pass
    else:
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
    _run([python, "-m", "pip", "install", "--quiet", *client.python])


def _npm(client: Client, folder: Path) -> None:
    for program in ("node", "npm"):
        if not shutil.which(program):
            raise NotInstalled(f"{program} is not on this machine")
    _run(["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", "--silent", *client.npm])


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {error}") from None
    if run.returncode != 0:
        lines = [line for line in (run.stderr or run.stdout).splitlines() if line.strip()]
        raise NotInstalled(f"{' '.join(command[:3])}: {lines[-1] if lines else 'failed'}")
