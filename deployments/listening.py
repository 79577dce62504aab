"""Whether an address can be listened on."""

import socket

EVERYWHERE = "::" if socket.has_ipv6 else "0.0.0.0"  # as Ray's gRPC proxy listens


def bind_fault(host: str, port: int) -> str | None:
    """Why nobody could listen there now, in the system's words; None: it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as failure:
            return failure.strerror or str(failure)
    return None
