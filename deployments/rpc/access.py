"""Who may call: whoever has a key; where there are no keys, whoever is on this machine.

Ray binds its gRPC proxy to all interfaces, whatever the host in the settings. Without keys nothing else
would keep strangers out.
"""

import ipaddress
from urllib.parse import unquote

from ray.serve.grpc_util import RayServegRPCContext

from deployments.keys import KeyRing
from deployments.observing.account import current
from deployments.openai.errors import InvalidApiKey
from deployments.rpc.status import metadata_of


class Access:
    """Lets calls in."""

    def __init__(self, keys: KeyRing):
        self._keys = keys

    def check(self, context: RayServegRPCContext) -> str:
        """Return whose call this is, by the name of the key, else by the peer's address.

        Raises ``InvalidApiKey`` unless the caller may come in.
        """
        if self._keys:
            given = metadata_of(context).get("authorization", "")
            key_id = self._keys.check(given if isinstance(given, bytes) else given.encode())
            if (account := current()) is not None:
                account.key_id = key_id
            return key_id
        if not is_loopback(context.peer()):
            raise InvalidApiKey(
                "This server has no API keys, so only callers of its own machine may use gRPC. "
                "Set api_keys_file or DFLASH_API_KEYS to let others in."
            )
        return host_of(context.peer())


def host_of(peer: str) -> str:
    """The address of a peer, by gRPC's name for it, without the port; empty for a socket file."""
    family, _, rest = unquote(peer).partition(":")
    return "" if family == "unix" else rest.rpartition(":")[0].strip("[]").partition("%")[0]


def is_loopback(peer: str) -> bool:
    """Tell whether a peer, by gRPC's name for it, is this machine: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5``."""
    if unquote(peer).startswith("unix:"):
        return True
    host = host_of(peer)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
