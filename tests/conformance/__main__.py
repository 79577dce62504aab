"""``python -m tests.conformance [CLIENT ...]``: foreign clients against the embedded pair.

Each client has an environment of its own under ``build/conformance``, made from the registries, and a script
in ``clients`` that prints a line of JSON for every check. One that cannot be installed is told as such. The
exit code is 1 if any check failed.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from tests.conformance.environments import NotInstalled, install
from tests.conformance.outcome import Outcome, play
from tests.conformance.server import Server, serving
from tests.conformance.table import CLIENTS, Client, write

FOLDER = Path("build/conformance")


def main() -> int:
    """Run the clients that were named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("client", nargs="*", help=f"of {', '.join(CLIENTS)}; all of them by default")
    parser.add_argument("--url", help="a server that runs already, instead of one started here")
    parser.add_argument("--uv", default="uv", help="the uv that makes the environments")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one client")
    options = parser.parse_args()
    unknown = [name for name in options.client if name not in CLIENTS]
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes too
    clients = [CLIENTS[name] for name in options.client or CLIENTS]
    FOLDER.mkdir(parents=True, exist_ok=True)
    installed = {client.name: _installed(client, options.uv) for client in clients}
    outcomes: list[Outcome] = []
    with serving(FOLDER / "server.log", options.url) as server:
        for client in clients:
            outcomes.append(_outcome(client, installed[client.name], server, options.timeout))
            print(outcomes[-1].line(), flush=True)
    print(write(outcomes))
    (FOLDER / "report.json").write_text(json.dumps([outcome.json() for outcome in outcomes], indent=1))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _installed(client: Client, uv: str) -> list[str] | str:
    """The command that runs the client's script, or why there is none."""
    print(f"installing {client.name}", file=sys.stderr, flush=True)
    try:
        return install(client, FOLDER / client.name, uv)
    except NotInstalled as error:
        return str(error)


def _outcome(client: Client, installed: list[str] | str, server: Server, timeout_s: float) -> Outcome:
    if isinstance(installed, str):
        return Outcome(client.name, [], missing=installed)
    return play(client.name, installed, server, FOLDER / client.name, timeout_s)


if __name__ == "__main__":
    sys.exit(main())
