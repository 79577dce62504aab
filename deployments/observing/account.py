"""What is known of one request: the edge opens an account, the router fills it in."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.trace import INVALID_SPAN, Span

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage

Reason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False)
class Account:
    """Grows with the request; times are seconds since it came."""

    method: str  # GET, or RPC
    path: str  # without its query; an RPC's full name
    request_id: str
    span: Span = INVALID_SPAN
    began_ns: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.monotonic)
    key_id: str | None = None  # which key let it in, never the key
    model: str | None = None  # None: nothing was to be generated, or it did not come to that
    window: str | None = None
    lane: str | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    reason: Reason | None = None
    error_kind: str | None = None
    usages: dict[int, Usage] = field(default_factory=dict[int, Usage])  # of each choice

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self.began

    @property
    def usage(self) -> Usage | None:
        """Counts up to now, all choices together."""
        return Usage.total(tuple(self.usages.values())) if self.usages else None

    def begin(self, generation: Generation) -> None:
        """The request is to be played."""
        self.model = generation.model
        self.usages = {0: Usage(len(generation.prompt_ids))}

    def add(self, event: Event) -> None:
        """Take an event of the generation."""
        match event:
            case Started():
                self.window, self.lane = event.window, event.lane
                if self.queue_s is None:
                    self.queue_s = event.waited_s
            case TextTokens():
                self.usages[event.index] = event.usage
                if self.first_token_s is None:
                    self.first_token_s = self.age_s
            case Ended():
                self.usages[event.index] = event.usage
                self.reason = event.finish_reason


_current: ContextVar[Account | None] = ContextVar("dflash_account", default=None)


def current() -> Account | None:
    """The account of the request that this task works for."""
    return _current.get()


def set_current(account: Account | None) -> None:
    """Let this task, and those that it starts, work for a request."""
    _current.set(account)
