"""The counters that fill the table of statistics, and its Prometheus text.

The router feeds a ``Statistics``; a ``Snapshot`` of it is plain data that may travel between processes;
``render`` turns snapshots of any number of engines into one page.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from deployments.messages import Traffic
from deployments.metric_table import BY_NAME, METRICS, Labels, Metric
from dflash_core.events import RoundReport

# Every consumer parses this version; it has no need of the negotiation that newer ones ask for.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FinishedReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations per bucket (one more than there are bounds: the rest) and their sum."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of one engine at one moment: metric name, then label values."""

    model_name: str
    engine: str
    values: Mapping[str, Mapping[Labels, float]]
    histograms: Mapping[str, Mapping[Labels, Histogram]]


class Statistics:
    """Counters of one engine. Fed on one thread; costs dictionary additions, no locks."""

    def __init__(self, model_name: str, engine: str):
        self._model_name = model_name
        self._engine = engine
        self._values: dict[str, dict[Labels, float]] = {}
        self._counts: dict[str, dict[Labels, list[int]]] = {}
        self._sums: dict[str, dict[Labels, float]] = {}
        for metric in METRICS:
            # A series that exists from the start lets a dashboard tell "none yet" from "not exported".
            known = [()] if not metric.labels else []
            if metric.name == "vllm:request_success_total":
                known = [("stop",), ("length",), ("abort",), ("error",)]
            if metric.type == "histogram":
                self._counts[metric.name] = {labels: [0] * (len(metric.buckets) + 1) for labels in known}
                self._sums[metric.name] = dict.fromkeys(known, 0.0)
            else:
                self._values[metric.name] = dict.fromkeys(known, 0.0)

    def observe_waiting(self, waiting: int) -> None:
        """Set the length of the queue."""
        self._set("vllm:num_requests_waiting", waiting)

    def observe_running(self, running: int) -> None:
        """Set the number of requests that have a place in a window."""
        self._set("vllm:num_requests_running", running)

    def observe_admitted(self, prompt_tokens: int, queue_seconds: float) -> None:
        """Count a request that got its place; not again when its row moves."""
        self._add("vllm:prompt_tokens_total", prompt_tokens)
        self._observe("vllm:request_queue_time_seconds", queue_seconds)

    def observe_tokens(self, num_tokens: int) -> None:
        """Count what an answer got; what a round committed beyond a stop string is nobody's."""
        self._add("vllm:generation_tokens_total", num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._observe("vllm:time_to_first_token_seconds", seconds)

    def observe_gap(self, seconds: float) -> None:
        """Record the time between two outputs of one request."""
        self._observe("vllm:inter_token_latency_seconds", seconds)

    def observe_finished(
        self,
        reason: FinishedReason,
        seconds: float,
        *,
        first_token_seconds: float | None = None,
        completion_tokens: int = 0,
    ) -> None:
        """Count a request that is over, ``seconds`` after its arrival."""
        self._add("vllm:request_success_total", 1, (reason,))
        self._observe("vllm:e2e_request_latency_seconds", seconds)
        if first_token_seconds is not None and completion_tokens > 1:
            per_token = (seconds - first_token_seconds) / (completion_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", per_token)

    def observe_round(self, report: RoundReport) -> None:
        """Count what one step of a window did."""
        self._add("dflash_prefilled_tokens_total", report.prefilled_tokens)
        if report.prefixes is not None:
            self._add("vllm:prefix_cache_queries_total", report.prefixes.queried)
            self._add("vllm:prefix_cache_hits_total", report.prefixes.found)
            self._set("dflash_prefix_bytes", report.prefixes.num_bytes)
        for phase, seconds in report.seconds.items():
            self._observe("dflash_round_seconds", seconds, (phase,))
        for row in report.rows:  # those outside the round too: reading a prompt may fail
            if row.finish == "error":
                self._add("dflash_row_failures_total", 1, (row.error_kind or "internal_error",))
            if row.drafted:
                self._observe_drafts(row.drafted, row.walked, row.accepted)
        if report.live_rows > 0:
            self._observe_live_rows(report.live_rows)

    def observe_exchange(self, traffic: Traffic) -> None:
        """Count what went from target to drafter."""
        for transport, calls in traffic.calls.items():
            self._add("dflash_exchange_calls_total", calls, (transport,))
        for transport, size in traffic.bytes.items():
            self._add("dflash_exchange_bytes_total", size, (transport,))
        self._add("dflash_exchange_failures_total", traffic.failures)
        self._add("dflash_drafter_mismatches_total", traffic.mismatches)
        self._add("dflash_contexts_lost_total", traffic.contexts_lost)

    def observe_missing(self, missing: int) -> None:
        """Set how many routers did not answer when this one asked."""
        self._set("dflash_routers_missing", missing)

    def observe_probe(self, shapes: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the probe's findings, as ``Findings.as_json`` gives them; earlier ones no longer hold."""
        series: dict[Labels, float] = {}
        for shape, finding in shapes.items():
            slots, width = shape.split("x")
            series[slots, width, str(finding["verdict"])] = float(finding["gap"])
        self._values["dflash_probe_gap_logits"] = series

    def _observe_live_rows(self, live_rows: int) -> None:
        self._add("dflash_rounds_total", 1)
        self._add("dflash_row_rounds_total", live_rows)
        self._set("dflash_window_rows", live_rows)
        most = self._values["dflash_window_rows_max"][()]
        self._set("dflash_window_rows_max", max(most, live_rows))
        self._observe("dflash_round_rows", live_rows)

    def _observe_drafts(self, drafted: int, walked: int, accepted: int) -> None:
        self._add("vllm:spec_decode_num_drafts_total", 1)
        self._add("vllm:spec_decode_num_draft_tokens_total", drafted)
        self._add("vllm:spec_decode_num_accepted_tokens_total", accepted)
        self._add("dflash_walked_tokens_total", walked)
        self._observe("dflash_accepted_per_row_round", accepted)
        for position in range(accepted):
            self._add("vllm:spec_decode_num_accepted_tokens_per_pos_total", 1, (str(position),))

    def snapshot(self) -> Snapshot:
        """Return a copy of all values."""
        return Snapshot(
            self._model_name,
            self._engine,
            {name: dict(series) for name, series in self._values.items()},
            {
                name: {labels: Histogram(tuple(n), self._sums[name][labels]) for labels, n in series.items()}
                for name, series in self._counts.items()
            },
        )

    def _add(self, name: str, amount: float, labels: Labels = ()) -> None:
        series = self._values[name]
        series[labels] = series.get(labels, 0.0) + amount

    def _set(self, name: str, value: float) -> None:
        self._values[name][()] = float(value)

    def _observe(self, name: str, value: float, labels: Labels = ()) -> None:
        bounds = BY_NAME[name].buckets
        counts = self._counts[name].setdefault(labels, [0] * (len(bounds) + 1))
        counts[bisect_left(bounds, value)] += 1
        sums = self._sums[name]
        sums[labels] = sums.get(labels, 0.0) + value


class _Page(Collector):
    """Lets prometheus_client write the text; holds nothing between two pages."""

    def __init__(self, snapshots: tuple[Snapshot, ...]):
        self._snapshots = snapshots

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric in METRICS:
            names = ("model_name", "engine", *metric.labels)
            if metric.type == "histogram":
                yield self._histogram(metric, names)
            else:
                family = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
                filled = family(metric.name, metric.help, labels=names)
                for snapshot in self._snapshots:
                    for labels, value in snapshot.values[metric.name].items():
                        filled.add_metric((snapshot.model_name, snapshot.engine, *labels), value)
                yield filled

    def _histogram(self, metric: Metric, names: Labels) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for snapshot in self._snapshots:
            for labels, histogram in snapshot.histograms[metric.name].items():
                bounds = [*map(str, metric.buckets), "+Inf"]
                below = 0
                buckets: list[tuple[str, float]] = []
                for bound, count in zip(bounds, histogram.counts, strict=True):
                    below += count
                    buckets.append((bound, float(below)))
                own = (snapshot.model_name, snapshot.engine, *labels)
                family.add_metric(own, buckets, sum_value=histogram.sum)
        return family


def render(snapshots: Iterable[Snapshot]) -> bytes:
    """Write one page of Prometheus text, one series per engine."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(tuple(snapshots)))
    return generate_latest(registry)
