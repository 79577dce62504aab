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

    def check(self, context: RayServegRPCContext) -> None:
        """Raise ``InvalidApiKey`` unless the caller may come in."""
        if self._keys:
            given = metadata_of(context).get("authorization", "")
            key_id = self._keys.check(given if isinstance(given, bytes) else given.encode())
            if (account := current()) is not None:
                account.key_id = key_id
        elif not is_loopback(context.peer()):
            raise InvalidApiKey(
                "This server has no API keys, so only callers of its own machine may use gRPC. "
                "Set api_keys_file or DFLASH_API_KEYS to let others in."
            )


def is_loopback(peer: str) -> bool:
    """Tell whether a peer, by gRPC's name for it, is this machine: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5``."""
    family, _, rest = unquote(peer).partition(":")
    if family == "unix":
        return True
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
