"""Every port that our processes and Ray's listen on, and whether the ones we want are free."""

import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import psutil

from deployments.doctor.finding import Finding, error, ok, warning
from deployments.doctor.token import asks_for_token
from deployments.keys import keys_of
from deployments.listening import bind_fault, everywhere, host_port
from deployments.settings import Settings

Owner = Literal["dflash-serve", "ray"]

# Parts of Ray's own command lines; a worker renames itself to what it runs.
_RAY_PATHS = (
    "/ray/core/src/ray/",
    "/ray/dashboard/",
    "/ray/_private/",
    "/ray/util/client/",
    "/ray/autoscaler/",
)


_PROXY = "ray::ProxyActor"  # Ray's name for the process that holds Serve's ports
_SERVERS = ("gcs_server", "raylet")  # they ask for the token; others of a node are started as these are


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    pid: int
    process: str
    owner: Owner

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_proxy(self) -> bool:
        """Whether it is Serve's, for HTTP and gRPC."""
        return self.process.partition(".")[0] == _PROXY  # while it works: its name and a method's

    def __str__(self) -> str:
        return f"{host_port(self.address, self.port)}  {self.owner}  {self.process} ({self.pid})"


def listeners() -> list[Listener]:
    """Look through the processes that this user may look at."""
    found: list[Listener] = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        owner = owner_of(command)
        if owner is not None and process.info["pid"] != os.getpid():
            found += _sockets(process, _short(command), owner)
    return sorted(found, key=lambda listener: (listener.port, listener.address, listener.pid))


def owner_of(command: Sequence[str]) -> Owner | None:
    """Tell from a command line whose process it is."""
    if any(part.startswith(("ray::", "RAY::")) for part in command[:1]):
        return "ray"
    if any(path in part for part in command[:4] for path in _RAY_PATHS):
        return "ray"
    if any(os.path.basename(part) == "dflash-serve" for part in command[:3]):
        return "dflash-serve"
    return None


def _sockets(process: psutil.Process, name: str, owner: Owner) -> Iterator[Listener]:
    try:
        connections = process.net_connections(kind="tcp")
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN:
            host, port = connection.laddr[:2]
            yield Listener(str(host), int(port), process.pid, name, owner)


def _short(command: Sequence[str]) -> str:
    """A process in a word: the last path that says something, without arguments."""
    if command[0].startswith("ray::"):
        return command[0].split()[0]
    paths = [part for part in command[:4] if any(path in part for path in _RAY_PATHS)]
    return os.path.basename((paths or list(command[:1]))[-1]).strip()


def check_listeners(
    found: Sequence[Listener], asks: Callable[[int], bool | None] = asks_for_token
) -> Finding:
    """List them all; say which ones others reach without a token. ``asks`` tells of a server by its pid."""
    facts = {"listeners": [asdict(listener) for listener in found]}
    if not found:
        return ok("ports", "nothing of ours and nothing of Ray's listens here", **facts)
    lines = [f"{len(found)} listening", *map(str, found)]
    exposed = [listener for listener in found if listener.owner == "ray" and not listener.is_local]
    answers = {f"{process} ({pid})": asks(pid) for pid, process in _servers(exposed) or _servers(found)}
    fault = _openness(answers) if exposed else None
    if fault is None:
        return ok("ports", "\n".join(lines), **facts)
    words, remedy = fault
    lines.append(f"{len(exposed)} of Ray's are open to the network; {words}")
    return warning("ports", "\n".join(lines), remedy, **facts)


def _openness(answers: Mapping[str, bool | None]) -> tuple[str, str] | None:
    """What is wrong with servers that others reach, and the remedy."""
    if without := [name for name, answer in answers.items() if answer is False]:
        remedy = (
            "export RAY_AUTH_MODE=token and start Ray again, or give ray start --node-ip-address=127.0.0.1"
        )
        return f"these ask for no token: {', '.join(without)}", remedy
    hidden = [name for name, answer in answers.items() if answer is None]
    if hidden or not answers:
        unseen = ", ".join(hidden) or "another user's processes"
        remedy = "run the doctor as the user who started Ray, and see that RAY_AUTH_MODE=token was set there"
        return f"whether with a token cannot be seen: {unseen}", remedy
    return None


def _servers(found: Iterable[Listener]) -> list[tuple[int, str]]:
    """Each once, though it has many ports."""
    return sorted({(listener.pid, listener.process) for listener in found if listener.process in _SERVERS})


def check_wanted(settings: Settings, found: Iterable[Listener]) -> Iterator[Finding]:
    """The ports of the settings are free, or Serve's proxy holds them; open ones ask for a key."""
    holders = {listener.port: listener for listener in found}
    wanted = (
        ("http_port", settings.host, settings.http_port),
        ("grpc_port", everywhere(), settings.grpc_port),
    )
    for name, host, port in wanted:
        where = host_port(host, port)
        holder = holders.get(port)
        if holder is not None and holder.is_proxy:
            yield ok(name, f"{where} is held by Serve", port=port)
        elif holder is not None:
            yield error(
                name,
                f"{where} is taken: {holder}",
                f"say --{name.replace('_', '-')} with another port",
                port=port,
            )
        elif (fault := bind_fault(host, port)) is not None:
            remedy = f"say --{name.replace('_', '-')} with another port, or stop what listens there"
            yield error(name, f"{where}: {fault}", remedy, port=port)
        else:
            yield ok(name, f"{where} is free", port=port)
    yield _check_keys(settings)


def _check_keys(settings: Settings) -> Finding:
    remedy = "name a file with one key a line (api_keys_file), or set DFLASH_API_KEYS"
    try:
        keys = keys_of(settings)
    except (OSError, ValueError) as failure:
        return error("api_keys", f"{settings.api_keys_file}: {failure}", remedy)
    if keys:
        return ok("api_keys", "callers need a key")
    if _is_loopback(settings.host):  # gRPC listens everywhere, and lets in whom ``rpc.access`` does
        return ok("api_keys", "none: only callers of this machine are let in")
    return warning("api_keys", "HTTP will be open to the network, without keys", remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
