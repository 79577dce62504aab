"""Watches requests: opens the account of each, follows what is played, writes one line at the end."""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from opentelemetry import trace
from opentelemetry.trace import Tracer

from deployments.generation import Ended, Event, Generation
from deployments.observing import spans
from deployments.observing.account import Account, Reason, current, set_current
from dflash_core.errors import DFlashError

access = logging.getLogger("dflash.access")

# Probes and routers elsewhere ask every second, a console twice as often, and their answers are no news.
QUIET = frozenset(
    {
        "/health",
        "/metrics",
        "/console/state",
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "dflash.v1.DFlashService/GetStats",
    }
)
_MAX_SHOWN = 200  # characters of a path
_SAID = frozenset({"method", "path", "status", "seconds"})  # of the facts, those that are the line's words
CLIENT_LEFT = "499"  # as nginx has it: the client went away before its answer began


class Watch:
    """One for a replica."""

    def __init__(self, tracer: Tracer | None = None, round_every: int = 0):
        self._tracer = tracer or trace.get_tracer("dflash")
        self._round_every = round_every

    def open(self, method: str, path: str, request_id: str, carrier: Mapping[str, str]) -> Account:
        """A request has come; this task works for it from now on."""
        account = Account(method, path, request_id)
        if path not in QUIET:
            account.span = spans.start(self._tracer, account, carrier)
        set_current(account)
        return account

    def close(self, account: Account, status: str) -> None:
        """It is answered, or its client is gone: the one line about it, and the end of its span."""
        spans.end(account, status)
        level = logging.DEBUG if account.path in QUIET else logging.INFO
        if not access.isEnabledFor(level):
            return
        facts = _facts(account, status)
        line = f"{account.method} {facts['path']} {status} {account.age_s * 1e3:.1f}ms"
        extra = {"facts": facts, "said": _SAID, "request_id": account.request_id}
        access.log(level, "%s", line, extra=extra)

    async def played(
        self, generation: Generation, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[Event, None]:
        """Pass on the events of a generation, taking note of them."""
        account = current() or Account("CALL", "generate", generation.request_id)
        account.begin(generation)
        playing = None
        if account.span.is_recording():
            playing = spans.Playing(self._tracer, account, generation, self._round_every)
        num_open = generation.num_choices
        reason: Reason = "abort"
        try:
            async with aclosing(events):
                async for event in events:
                    account.add(event)
                    if playing is not None:
                        playing.add(event)
                    num_open -= isinstance(event, Ended)
                    yield event
        except Exception as error:
            reason = "error"
            account.error_kind = error.kind if isinstance(error, DFlashError) else DFlashError.kind
            raise
        finally:
            if num_open > 0:
                account.reason = reason
            if playing is not None:
                playing.finish(reason)


def _facts(account: Account, status: str) -> dict[str, object]:
    """What the line says beside its words; nothing that is not known."""
    shown = account.path if len(account.path) <= _MAX_SHOWN else account.path[:_MAX_SHOWN] + "..."
    usage = account.usage
    facts: dict[str, object] = {
        "method": account.method,
        "path": shown.encode("unicode_escape").decode(),  # no line breaks out of a client's hand
        "status": status,
        "seconds": round(account.age_s, 4),
        "key": account.key_id,
        "error": account.error_kind,
        "model": account.model,
        "finish": account.reason,
        "window": account.window,
        "lane": account.lane,
        "queue_s": account.queue_s and round(account.queue_s, 4),
        "ttft_s": account.first_token_s and round(account.first_token_s, 4),
    }
    if usage is not None:
        facts |= {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "rounds": usage.rounds,
            "drafted": usage.drafted,
            "accepted": usage.accepted,
        }
    return {name: value for name, value in facts.items() if value is not None}
