"""Sends spans to a collector: OpenTelemetry's SDK and its exporter, from the extra ``trace``."""

from opentelemetry.trace import Tracer

from deployments import __version__


class NoSdk(RuntimeError):
    """A trace endpoint is set and the packages that would serve it are not there."""


def tracer_to(endpoint: str | None, replica: str) -> Tracer | None:
    """Return a tracer whose spans go to ``endpoint`` by OTLP over HTTP; None for None.

    The provider is our own, not the process's: Ray has one for its tracing. Headers, sampling and batches are
    the SDK's ``OTEL_`` variables.
    """
    if endpoint is None:
        return None
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
    return provider.get_tracer("dflash", __version__)


def _traces_of(endpoint: str) -> str:
    """A collector's address is enough, as it is in OTEL_EXPORTER_OTLP_ENDPOINT."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
