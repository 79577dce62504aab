"""Lanes elsewhere, asked as a router of these settings would ask them."""

import asyncio
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from deployments.doctor.finding import Finding, error, ok, warning
from deployments.engine import LocalEngine
from deployments.remote import remote_lanes
from deployments.remote.lane import PATIENCE, RemoteLane, State
from deployments.settings import Settings
from dflash_core.errors import DFlashError

_REMEDIES: Mapping[State, str] = {
    "away": "start that cluster; see to its address, its gRPC port and the firewalls between",
    "not serving": "see to that cluster: its targets do not answer yet",
    "refuses our key": "put one of its keys into remote_key_file, or DFLASH_REMOTE_KEY",
    "shows a certificate that is not trusted": "name its authority in remote_ca_file",
    "another model": "name in target, here, what is served there, or its served_model_names",
    "serves a shorter context": "set max_context here to that of the lane",
}
_ANY = "see /health there"


def check_lanes(settings: Settings) -> Iterator[Finding]:
    """Whether each is reached, takes our key and serves our model; without targets here, one of them must."""
    try:
        parts = LocalEngine().open_router(settings)
        lanes = remote_lanes(settings, parts, f"doctor-{uuid.uuid4().hex[:9]}")
    except (DFlashError, OSError, ValueError) as failure:
        remedy = "name a checkpoint in target and drafter, and readable files of keys and certificates"
        yield error("remote_lanes", f"a router could not start: {failure}", remedy)
        return
    with _silence():
        asyncio.run(_ask_all(lanes))
    is_played = settings.local_lanes or any(lane.state == "ok" for lane in lanes)
    for lane in lanes:
        yield _finding(lane, is_played=is_played)


@contextmanager
def _silence() -> Iterator[None]:
    """What the lanes log is what we find."""
    logger = logging.getLogger("dflash.remote")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _ask_all(lanes: Sequence[RemoteLane]) -> None:
    await asyncio.gather(*map(_ask, lanes))


async def _ask(lane: RemoteLane) -> None:
    try:
        for _ in range(PATIENCE):
            await lane.ask()
            if lane.state != "unknown":
                return
    finally:
        await lane.close()


def _finding(lane: RemoteLane, *, is_played: bool) -> Finding:
    words = f"{lane.name}: {lane.state}" + (f" ({lane.reason})" if lane.reason else "")
    facts = {"address": lane.name, "state": lane.state}
    if lane.state == "ok":
        room = sum(route.room for route in lane.routes)
        return ok("remote_lanes", f"{words}, room for {room} rows", **facts)
    make = warning if is_played else error
    return make("remote_lanes", words, _REMEDIES.get(lane.state, _ANY), **facts)
