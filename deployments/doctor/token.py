"""Ray's token authentication, as this shell would use it, and as a running process does."""

import stat
from collections.abc import Mapping
from pathlib import Path

import psutil

from deployments.doctor.finding import Finding, error, ok, warning


def asks_for_token(pid: int) -> bool | None:
    """Whether a running server of Ray asks for a token; None: this user may not look.

    Its own environment tells: what this shell says now is no part of it, and ``ray start`` sets the mode
    where it finds a token.
    """
    try:
        return psutil.Process(pid).environ().get("RAY_AUTH_MODE", "").lower() == "token"
    except (psutil.Error, OSError):
        return None


def token_source(environment: Mapping[str, str], home: Path | None) -> str | None:
    """Where Ray finds the token, in its order; never the token."""
    if environment.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    if path:
        return path
    file = home / ".ray" / "auth_token" if home is not None else None
    return str(file) if file is not None and file.is_file() else None


def check_token(environment: Mapping[str, str], home: Path | None) -> Finding:
    """Mode and token agree, and nobody else reads the token's file."""
    mode = environment.get("RAY_AUTH_MODE")
    source = token_source(environment, home)
    facts = {"mode": mode, "source": source}
    if mode == "disabled":
        remedy = "export RAY_AUTH_MODE=token on every node, unless the network is yours alone"
        return warning("token", "off: whoever reaches a port of Ray runs code there", remedy, **facts)
    if mode not in (None, "token"):
        return error("token", f"RAY_AUTH_MODE is {mode}", "export RAY_AUTH_MODE=token", **facts)
    if source is None:
        message = "no token yet: ray.init makes one, ray start and ray job do not"
        return warning("token", message, "ray get-auth-token --generate, and copy it to every node", **facts)
    if source != "RAY_AUTH_TOKEN":
        if (fault := _file_fault(Path(source))) is not None:
            return error("token", f"{source} {fault[0]}", fault[1], **facts)
        if (mode_of_file := _open_mode(Path(source))) is not None:  # as Ray itself writes it
            message = f"{source} is open to other users of this machine (mode {mode_of_file:03o})"
            return warning("token", message, f"chmod 600 {source}", **facts)
    if mode is None:
        message = f"a token is in {source}, and RAY_AUTH_MODE is not set: serve deploy and ray job get a 401"
        return warning("token", message, "export RAY_AUTH_MODE=token", **facts)
    return ok("token", f"on, from {source}", **facts)


def _file_fault(file: Path) -> tuple[str, str] | None:
    """What is wrong, and the remedy."""
    try:
        is_empty = not file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as failure:
        return f"cannot be read ({failure})", "name a readable file in RAY_AUTH_TOKEN_PATH"
    return ("is empty", "copy the token of the head node into it") if is_empty else None


def _open_mode(file: Path) -> int | None:
    mode = stat.S_IMODE(file.stat().st_mode)
    return mode if mode & (stat.S_IRWXG | stat.S_IRWXO) else None
