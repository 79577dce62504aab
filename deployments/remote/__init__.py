"""Lanes elsewhere: another cluster's gRPC endpoint, to which each row goes as a call of its own.

``spec`` says a row in the contract's words, ``row`` reads its answer back as a row's progress, ``window``
keeps the calls of one window, ``lane`` is the stage over one address, with its health and its room.
"""

from deployments.engine import RouterParts
from deployments.keys import read_keys
from deployments.remote.lane import Model, RemoteLane
from deployments.settings import Settings


def remote_lanes(settings: Settings, parts: RouterParts) -> list[RemoteLane]:
    """A lane for each address that the settings name; raises ValueError where the key's file has none."""
    keys = read_keys(settings.remote_key_file)
    own = settings.remote_key.get_secret_value() if settings.remote_key is not None else None
    key = keys[0] if keys else own
    model = Model(parts.card.names, parts.tokenizer.vocab_size, parts.card.max_context)
    return [RemoteLane(address, key, model, settings.max_rows) for address in settings.remote_lanes]
