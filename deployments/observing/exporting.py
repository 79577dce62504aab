"""Sends spans to a collector: OpenTelemetry's SDK and its exporter, from the extra ``trace``."""

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.trace import Tracer, get_tracer

from deployments import __version__

_NAME = "dflash"


class NoSdk(RuntimeError):
    """A trace endpoint is set and the packages that would serve it are not there."""


@dataclass(frozen=True, slots=True)
class Exporting:
    """Makes spans; ``stop`` sends those that still wait, and takes no more."""

    tracer: Tracer
    stop: Callable[[], None]


def exporting_to(endpoint: str | None, replica: str) -> Exporting:
    """Let spans go to ``endpoint`` by OTLP over HTTP; for None they go nowhere.

    The provider is our own, not the process's: Ray has one for its tracing. Headers, sampling and batches are
    the SDK's ``OTEL_`` variables.
    """
    if endpoint is None:
        return Exporting(get_tracer(_NAME, __version__), lambda: None)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise NoSdk(
            f"trace_endpoint is set, but {error.name} is not installed: add the extra 'trace'"
        ) from None
    facts = {"service.name": "dflash-serve", "service.version": __version__, "service.instance.id": replica}
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins.
    provider = TracerProvider(resource=Resource.create(facts).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=_traces_of(endpoint))))
    return Exporting(provider.get_tracer(_NAME, __version__), provider.shutdown)


def _traces_of(endpoint: str) -> str:
    """A collector's address is enough, as it is in OTEL_EXPORTER_OTLP_ENDPOINT."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
