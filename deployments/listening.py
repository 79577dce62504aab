"""Addresses to listen on: how one is written, and whether it is free."""

import socket

NEAREST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What this machine itself calls an address that stands for all of its own."""


def host_port(host: str, port: int) -> str:
    """Host and port as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def everywhere() -> str:
    """Where Ray's gRPC proxy listens. Python may know IPv6 where the kernel does not."""
    return "::" if bind_fault("::", 0) is None else "0.0.0.0"


def bind_fault(host: str, port: int) -> str | None:
    """Why nobody could listen there now, in the system's words; None: it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as failure:
        return failure.strerror or str(failure)
    return None
