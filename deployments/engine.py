"""Where the deployments make engine objects: the one place that knows the engine's constructors.

Tests hand the deployments another ``Engine``. Imports of MLX stay inside the functions: the router has no
use for it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deployments import memory
from deployments.boundaries import find_opener
from deployments.generation import ModelCard, SamplingDefaults
from deployments.memory import Pair, read_pair, require_room, require_shared_room, with_prefixes
from deployments.nodes import is_one_machine
from deployments.pairing import resolve_pair
from deployments.settings import Settings, model_name
from dflash_core import blas
from dflash_core.checkpoints import (
    DrafterSpec,
    read_block_size,
    read_drafter_spec,
    read_max_context,
    read_target_spec,
)
from dflash_core.checkpoints.json_file import read_loose_json
from dflash_core.request import WindowId
from dflash_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from deployments.exchange.absent import NoDrafter
    from deployments.exchange.remote import DrafterLink, RemoteDrafter
    from deployments.exchange.sessions import Sessions
    from deployments.lane import Lane
    from dflash_core.prefixes import Prefixes
    from dflash_core.target import Target


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a target replica works with."""

    lane: "Lane"
    exchange: "RemoteDrafter | None"
    facts: Mapping[str, Any] = field(default_factory=dict)  # for /health: device, mlx, width, exactness


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a router replica works with."""

    card: ModelCard
    tokenizer: Tokenizer


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
        """Load a target and probe it; then its drafter's projection, unless strictness declines drafts."""
        blas.prepare()  # before the first import of MLX
        from deployments.exactness import judge
        from deployments.exchange.absent import NoDrafter
        from deployments.lane import Lane
        from deployments.machine import backend, mlx_version, processor
        from deployments.warm import findings_of, measured_costs, warm_target
        from dflash_core.acceptance import Acceptance
        from dflash_core.loading import build_target, feed_drafter
        from dflash_core.width import AutoWidth, FixedWidth
        from dflash_core.window import Window, WindowPolicy

        target_path, drafter_path = resolve_pair(settings.target, settings.drafter)
        limit = memory.find_limit()
        sizes = _sizes(settings, target_path, drafter_path)
        pair = with_prefixes(sizes, settings.wanted_prefix_bytes, limit)
        require_room(pair, limit, frozenset({memory.TARGET}))
        _require_shared_room(pair)
        target, spec = build_target(target_path, None)
        drafter_spec = read_drafter_spec(drafter_path, spec) if drafter_path is not None else None
        block_size = 1 if drafter_spec is None or link is None else drafter_spec.block_size
        widest = min(settings.block_width or block_size, block_size)
        exactness = judge(
            findings_of(settings, target, spec.fingerprint, widest),
            is_strict=settings.strict,
            max_rows=settings.max_rows,
            widest=widest,
        )
        exchange = None
        if drafter_path and drafter_spec and link and not exactness.is_declined:
            target = feed_drafter(target, spec, drafter_path)
            exchange = _open_exchange(settings, link, loop, drafter_spec)
        drafter = exchange or NoDrafter()
        warm_target(target, exactness.max_rows, exactness.widest)
        costs = None if exchange is None else measured_costs(settings, target, exchange, spec.fingerprint)
        acceptance = Acceptance(drafter.block_size)
        prefixes = _prefixes(pair.prefix_bytes, target, spec.fingerprint, drafter)

        def open_window(window_id: WindowId) -> Window:
            shapes = exactness.shapes
            width = (
                FixedWidth(exactness.widest, shapes)
                if costs is None
                else AutoWidth(costs, acceptance, shapes)
            )
            policy = WindowPolicy(
                width, exactness.max_rows, shapes=shapes, prefill_rows=exactness.prefill_rows
            )
            return Window(window_id, target, drafter, policy, prefixes)

        take_traffic = exchange.transport.take_traffic if exchange is not None else lambda: None
        chosen = "fixed" if costs is None else "auto, up to"
        favours_two = costs is not None and costs.favours_two_windows
        lane = Lane(
            open_window,
            settings.max_windows * (2 if favours_two else 1),  # of half the rows each
            take_traffic,
            max_rows=exactness.max_rows,
            favours_two=favours_two,
        )
        facts = {
            "device": backend(),
            "processor": processor(),
            "mlx": mlx_version(),
            "width": "classic" if exactness.widest == 1 else f"{chosen} {exactness.widest}",
            "exactness": exactness.as_json(),
            "windows": "two, alternating" if lane.favours_two else "one",
        }
        return TargetParts(lane, exchange, facts)

    def open_drafter(self, settings: Settings) -> "Sessions":
        """Load a drafter; of the target only embedding and head."""
        blas.prepare()
        from deployments.exchange.sessions import Sessions
        from deployments.exchange.transport import dtype_name
        from deployments.warm import warm_drafter
        from dflash_core.loading import build_drafter

        target_path, drafter_path = resolve_pair(settings.target, settings.drafter)
        if drafter_path is None:
            raise ValueError("the settings name no drafter")
        pair = _sizes(settings, target_path, drafter_path)
        require_room(pair, roles=frozenset({memory.DRAFTER}))
        _require_shared_room(pair)
        drafter, spec = build_drafter(target_path, drafter_path)
        sessions = Sessions(drafter, spec.fingerprint, settings.session_ttl_s)
        width = min(settings.block_width or spec.block_size, spec.block_size)
        warm_drafter(sessions, spec, dtype_name(drafter.feature_dtype), settings.max_rows, width)
        return sessions

    def open_router(self, settings: Settings) -> RouterParts:
        """Read tokenizer and configs. Where every lane is elsewhere, no weights are fetched."""
        weights = settings.local_lanes
        target_path, drafter_path = resolve_pair(settings.target, settings.drafter, weights=weights)
        tokenizer = Tokenizer.load(target_path)
        if weights:  # checked against the configs, all of them
            spec = read_target_spec(target_path)
            tokenizer.require_within(spec.vocab_size)
            max_context = spec.max_context
            block_size = read_drafter_spec(drafter_path, spec).block_size if drafter_path is not None else 1
        else:
            max_context = read_max_context(target_path)
            block_size = read_block_size(drafter_path) if drafter_path is not None else 1
        file = target_path / "generation_config.json"
        config = read_loose_json(file) if file.exists() else {}
        card = ModelCard(
            names=settings.served_model_names,
            created=int(file.stat().st_mtime) if file.is_file() else 0,
            max_context=min(settings.max_context or max_context, max_context),
            defaults=SamplingDefaults.of_generation_config(config),
            drafter=model_name(settings.drafter) if settings.drafter is not None else None,
            block_size=block_size,
            message_opener=find_opener(tokenizer),
        )
        return RouterParts(card, tokenizer)


def _sizes(settings: Settings, target_path: Path, drafter_path: Path | None) -> Pair:
    rows, max_context = settings.max_rows, settings.max_context
    return read_pair(target_path, drafter_path, rows=rows, max_context=max_context)


def _require_shared_room(pair: Pair) -> None:
    import ray

    if ray.is_initialized() and is_one_machine(ray.nodes()):
        require_shared_room(pair)


def _prefixes(
    num_bytes: int, target: "Target", fingerprint: str, drafter: "RemoteDrafter | NoDrafter"
) -> "Prefixes | None":
    from deployments.exchange.transport import dtype_name
    from deployments.warm import warm_copies
    from dflash_core.prefix_store import Origin, PrefixStore
    from dflash_core.prefixes import Prefixes

    if num_bytes == 0:
        return None
    warm_copies(target)
    origin = Origin(fingerprint, drafter.fingerprint, dtype_name(target.feature_dtype))
    return Prefixes(PrefixStore(num_bytes), origin, drafter)


def _open_exchange(
    settings: Settings, link: "DrafterLink", loop: asyncio.AbstractEventLoop, spec: DrafterSpec
) -> "RemoteDrafter":
    from deployments.exchange.patience import Patience
    from deployments.exchange.remote import RemoteDrafter
    from deployments.exchange.retention import default_limit
    from deployments.exchange.transport import Transport

    return RemoteDrafter(
        link,
        loop,
        Transport(settings.transport, settings.ref_threshold_bytes),
        spec.fingerprint,
        spec.block_size,
        Patience(settings.draft_timeout_s),
        settings.feature_bytes or default_limit(),
    )
