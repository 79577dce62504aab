"""Addresses of gRPC endpoints, as people write them: ``host:port``, or ``grpcs://host:port`` for TLS."""

from dataclasses import dataclass
from typing import Self

_SCHEMES = {"": False, "grpc": False, "grpcs": True}


@dataclass(frozen=True, slots=True)
class Address:
    """Where to call, and whether under TLS."""

    target: str  # host:port
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raise ValueError for what is no address."""
        scheme, separator, rest = text.rpartition("://")
        host, _, port = rest.rpartition(":")
        known = scheme in _SCHEMES and bool(scheme) == bool(separator)
        if not known or not host or "/" in host or not port.isdecimal():
            raise ValueError(f"'{text}' is no address: host:port is one, or grpcs://host:port")
        return cls(rest, _SCHEMES[scheme])
