"""Model files, the fit of the pair, and the sum of what it needs in memory."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from deployments.doctor.finding import Finding, error, ok, warning
from deployments.memory import BOTH, LEAST_TOKENS, Need, Pair, Roles
from deployments.memory_limit import Limit, gib, wired_advice
from deployments.pairing import resolve_pair
from deployments.settings import Settings
from dflash_core.checkpoints import read_drafter_spec, read_target_spec
from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.text import Tokenizer

_CHECKPOINT_REMEDY = "name a complete checkpoint: --target and --drafter take a directory or a hub id"


def check_files(settings: Settings) -> Iterator[Finding]:
    """Read both checkpoints' configs and headers, the tokenizer and the chat template."""
    try:
        target, drafter = resolve_pair(settings.target, settings.drafter)
        spec = read_target_spec(target)
        tokenizer = Tokenizer.load(target)
        tokenizer.require_within(spec.vocab_size)
        template = tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
    except (CheckpointError, InvalidRequest, OSError, ValueError) as failure:
        yield error("target", str(failure), _CHECKPOINT_REMEDY)
        return
    size = f"{spec.num_layers} layers, hidden {spec.hidden_size}, context {spec.max_context}"
    packed = "full precision" if spec.quantization is None else f"{spec.quantization.bits}-bit"
    yield ok("target", f"{settings.target}: {size}, {spec.dtype}, {packed}", fingerprint=spec.fingerprint)
    yield ok("chat", f"tokenizer and chat template work ({len(template)} tokens for a greeting)")
    yield _pair_fit(settings, drafter, target)


def _pair_fit(settings: Settings, drafter: Path | None, target: Path) -> Finding:
    if drafter is None:
        remedy = "name the drafter that was made for this target: --drafter"
        return warning("pair", "no drafter: every round is classic", remedy)
    try:
        spec = read_drafter_spec(drafter, read_target_spec(target))
    except CheckpointError as failure:
        return error("pair", str(failure), "name the drafter that was made for this target, or none")
    taps = ", ".join(map(str, spec.taps))
    message = f"{settings.drafter} fits: block {spec.block_size}, taps {taps}"
    return ok("pair", message, fingerprint=spec.fingerprint)


def check_memory(pair: Pair, limit: Limit, roles: Roles = BOTH, where: str = "") -> Finding:
    """Refuse what has weights and shortest useful rows that do not fit; warn where long rows do not.

    ``where`` is a node's name and what it is to hold, for the message.
    """
    full = pair.need(pair.max_context, roles)
    least = pair.need(min(LEAST_TOKENS, pair.max_context), roles)
    facts = {"need": asdict(full), "limit": asdict(limit)}
    room = f"{limit.source}: {gib(limit.bytes).strip()}"
    if full.total <= limit.bytes:
        return ok("memory", f"{where}fits, {room}\n{full.explain()}", **facts)
    if least.total > limit.bytes:
        message = f"{where}does not fit, {room}\n{least.explain()}"
        return error("memory", message, _shrink(pair, least, limit, roles), **facts)
    longest = pair.longest(limit.bytes, roles)
    message = f"{where}rows that fill the context do not all fit at once, {room}\n{full.explain()}"
    rows = pair.most_rows(pair.max_context, limit.bytes, roles)
    fewer = f", or max_rows: {rows}" if rows else ""
    remedy = f"set max_context: {longest}{fewer}{wired_advice(full.total, limit)}"
    return warning("memory", message, remedy, **facts)


def _shrink(pair: Pair, least: Need, limit: Limit, roles: Roles) -> str:
    rows = pair.most_rows(least.tokens, limit.bytes, roles)
    advice = (
        f"set max_rows: {rows}" if rows else "take a smaller or a 4-bit target, or a machine with more memory"
    )
    return f"{advice}{wired_advice(least.total, limit)}"
