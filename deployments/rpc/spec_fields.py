"""Which fields of ``GenerationSpec`` a server knows, and which of them a message uses, by path.

proto3 passes over fields that it does not know. That is harmless for a client's hint and not for a row of
another cluster: one whose grammar is passed over gets a wrong answer that looks like a right one.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from dflash_core.errors import DFlashError

SINCE_LISTS = ("continued", "logprobs.prompt", "structure")
"""What servers may not know that do not tell what they know, with all that lies below."""


class UnknownField(DFlashError):
    """The row asks for something that this server has no word for."""

    kind = "unknown_field"


def known_fields() -> frozenset[str]:
    """Every path that this server obeys."""
    return frozenset(_paths(pb.GenerationSpec.DESCRIPTOR, ""))


def fields_before_lists() -> frozenset[str]:
    """What a server obeys that does not tell."""
    news = tuple(f"{path}." for path in SINCE_LISTS)
    return frozenset(path for path in known_fields() if not f"{path}.".startswith(news))


def used_fields(message: Message, prefix: str = "") -> frozenset[str]:
    """Every path that is set, the messages on the way included."""
    found: set[str] = set()
    for field, value in message.ListFields():
        found.add(prefix + field.name)
        if not _has_fields(field):
            continue
        for part in value if _is_repeated(field) else (value,):
            found |= used_fields(part, f"{prefix}{field.name}.")
    return frozenset(found)


def require_known(message: Message, prefix: str = "spec") -> None:
    """Raise UnknownField if the message, or one in it, has a field that this server does not know."""
    unknown = [str(field.field_number) for field in UnknownFieldSet(message)]
    if unknown:
        raise UnknownField(f"'{prefix}' has fields that this server does not know: number {unknown[0]}")
    for field, value in message.ListFields():
        if _has_fields(field):
            for part in value if _is_repeated(field) else (value,):
                require_known(part, f"{prefix}.{field.name}")


def _paths(descriptor: Any, prefix: str) -> Iterator[str]:  # both of protobuf's implementations have one
    for field in descriptor.fields:
        yield prefix + field.name
        if _has_fields(field):
            yield from _paths(field.message_type, f"{prefix}{field.name}.")


def _has_fields(field: Any) -> bool:
    """Whether its values are messages; a map's entries are no fields of ours."""
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _is_repeated(field: Any) -> bool:
    return field.is_repeated
