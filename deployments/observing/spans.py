"""A span for each request, by OpenTelemetry's API alone: where no SDK records, it costs next to nothing.

Names are those of the semantic conventions for generative models where these have one, ``dflash.`` otherwise.
A request's span has three children, one after the other: ``queue``, ``prefill``, ``decode``.
"""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.observing.account import Account

_PROPAGATOR = TraceContextTextMapPropagator()
_PROVIDER = "dflash"


def start(tracer: Tracer, account: Account, carrier: Mapping[str, str]) -> Span:
    """Begin the span of a request, below the caller's if ``traceparent`` names one."""
    # A context of its own: no span of Ray's, or of whoever opened a window, is this one's parent.
    parent = _PROPAGATOR.extract(carrier, Context())
    name = f"{account.method} {account.path}" if account.method == "RPC" else account.method
    return tracer.start_span(name, parent, SpanKind.SERVER, start_time=account.began_ns)


# Statuses that are the server's fault; a client's mistake is no error of the span.
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


def end(account: Account, status: str) -> None:
    """Say how the request ended. ``status`` is HTTP's number or gRPC's word."""
    span = account.span
    if not span.is_recording():
        return
    span.set_attribute("dflash.request_id", account.request_id)
    if account.method == "RPC":
        is_fault = status in _FAULTS
        span.set_attribute("rpc.response.status_code", status)
    else:
        is_fault = status >= "500"
        span.set_attribute("http.request.method", account.method)
        span.set_attribute("http.response.status_code", int(status))
    if account.key_id is not None:
        span.set_attribute("dflash.key_id", account.key_id)
    if account.error_kind is not None:
        span.set_attribute("error.type", account.error_kind)
    if is_fault or account.reason == "error":
        span.set_status(Status(StatusCode.ERROR, account.error_kind))
    span.end()


class Playing:
    """The part of a request's span in which it is played: attributes, phases, sampled rounds."""

    def __init__(self, tracer: Tracer, account: Account, generation: Generation, round_every: int):
        self._span = account.span
        self._account = account
        self._tracer = tracer
        self._round_every = round_every
        self._context = trace.set_span_in_context(self._span, Context())
        self._began_ns = time.time_ns()
        self._placed_ns: int | None = None
        self._decode: Span = INVALID_SPAN
        self._told: dict[int, Usage] = {}  # at the last event of each choice
        self._ends: dict[int, str] = {}
        self._begin(generation)

    def add(self, event: Event) -> None:
        """Take an event."""
        match event:
            case Started():
                self._place(event)
            case TextTokens():
                self._first_token()
                self._round(event)
            case Ended():
                self._ends[event.index] = event.finish_reason

    def finish(self, reason: str) -> None:
        """The generation is over, or its client is gone."""
        now = time.time_ns()
        if self._decode is not INVALID_SPAN:
            self._decode.end(now)
        elif self._placed_ns is not None:
            self._phase("prefill", self._placed_ns).end(now)
        else:
            self._phase("queue", self._began_ns).end(now)
        reasons = [self._ends[index] for index in sorted(self._ends)] or [reason]
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        account = self._account
        usage = account.usage
        if usage is not None:
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "dflash.rounds": usage.rounds,
                    "dflash.drafted": usage.drafted,
                    "dflash.walked": usage.walked,
                    "dflash.accepted": usage.accepted,
                }
            )
        if account.first_token_s is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", account.first_token_s)

    def _begin(self, generation: Generation) -> None:
        is_chat = not generation.id.startswith("cmpl-")
        operation = "chat" if is_chat else "text_completion"
        sampling = generation.sampling
        self._span.update_name(f"{operation} {generation.model}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": generation.model,
                "gen_ai.response.model": generation.model,
                "gen_ai.response.id": generation.id,
                "gen_ai.request.max_tokens": generation.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.choice.count": generation.num_choices,
                "gen_ai.request.stream": generation.delivery.stream,
                "url.path": self._account.path,
            }
        )

    def _place(self, event: Started) -> None:
        self._span.set_attributes({"dflash.window": event.window, "dflash.lane": event.lane})
        if self._placed_ns is not None:  # another choice's place, or the row has moved
            if self._decode is not INVALID_SPAN:
                self._decode.add_event("moved", {"dflash.window": event.window, "dflash.lane": event.lane})
            return
        self._placed_ns = min(self._began_ns + int(event.waited_s * 1e9), time.time_ns())
        self._phase("queue", self._began_ns).end(self._placed_ns)

    def _first_token(self) -> None:
        if self._decode is INVALID_SPAN:
            now = time.time_ns()
            self._phase("prefill", self._placed_ns or self._began_ns).end(now)
            self._decode = self._phase("decode", now)

    def _round(self, event: TextTokens) -> None:
        before = self._told.get(event.index, Usage(event.usage.prompt_tokens))
        self._told[event.index] = usage = event.usage
        every = self._round_every
        if every == 0 or usage.rounds // every == before.rounds // every:
            return
        self._decode.add_event(
            "round",
            {
                "dflash.round": usage.rounds,
                "dflash.choice": event.index,
                "dflash.drafted": usage.drafted - before.drafted,
                "dflash.walked": usage.walked - before.walked,
                "dflash.accepted": usage.accepted - before.accepted,
                "dflash.tokens": len(event.token_ids),
            },
        )

    def _phase(self, name: str, start_ns: int) -> Span:
        return self._tracer.start_span(name, self._context, start_time=start_ns)
