"""Lanes elsewhere: another cluster's gRPC endpoint, to which each row goes as a call of its own.

``spec`` says a row in the contract's words, ``row`` reads its answer back as a row's progress, ``window``
keeps the calls of one window, ``lane`` is the stage over one address, with its health and its room. ``route``
keeps rows from going in circles, ``terms`` says which rows a lane takes.
"""

from deployments.engine import RouterParts
from deployments.keys import read_keys
from deployments.remote.lane import Caller, Model, RemoteLane
from deployments.settings import Settings


def remote_lanes(settings: Settings, parts: RouterParts, cluster: str) -> list[RemoteLane]:
    """A lane for each address that the settings name; ``cluster`` is the id of the one that calls.

    Raises ValueError where the key's file has none, OSError where a file cannot be read.
    """
    keys = read_keys(settings.remote_key_file)
    own = settings.remote_key.get_secret_value() if settings.remote_key is not None else None
    ca = settings.remote_ca_file.read_bytes() if settings.remote_ca_file is not None else None
    caller = Caller(cluster, keys[0] if keys else own, ca)
    model = Model(parts.card.names, parts.tokenizer.vocab_size, parts.card.max_context)
    return [RemoteLane(address, caller, model, settings.max_rows) for address in settings.remote_lanes]
