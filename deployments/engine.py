"""Where the deployments make engine objects: the one place that knows the engine's constructors.

Tests hand the deployments another ``Engine``. Imports of MLX stay inside the functions: the router has no
use for it.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deployments.generation import ModelCard
from deployments.settings import Settings

if TYPE_CHECKING:
    from deployments.exchange.remote import DrafterLink, RemoteDrafter
    from deployments.exchange.sessions import Sessions
    from deployments.lane import Lane
    from dflash_core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a target replica works with."""

    lane: "Lane"
    exchange: "RemoteDrafter | None"


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a router replica works with."""

    card: ModelCard
    tokenizer: "Tokenizer"


class Engine(Protocol):
    """Makes each replica's parts. Travels to the replicas by pickle, so it holds nothing."""

    def open_target(
        self, settings: Settings, link: "DrafterLink | None", loop: asyncio.AbstractEventLoop
    ) -> TargetParts:
        """Load and warm a target; on its replica's MLX thread."""
        ...

    def open_drafter(self, settings: Settings) -> "Sessions":
        """Load and warm a drafter; on its replica's MLX thread."""
        ...

    def open_router(self, settings: Settings) -> RouterParts:
        """Read what a router must know of the model; no weights."""
        ...


class LocalEngine:
    """The real engine: ``dflash_core`` over the checkpoints that the settings name."""

    def open_target(
        self, settings: Settings, link: "DrafterLink | None", loop: asyncio.AbstractEventLoop
    ) -> TargetParts:
        """Load and warm a target."""
        raise NotImplementedError

    def open_drafter(self, settings: Settings) -> "Sessions":
        """Load and warm a drafter."""
        raise NotImplementedError

    def open_router(self, settings: Settings) -> RouterParts:
        """Read tokenizer and config."""
        raise NotImplementedError
