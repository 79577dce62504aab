"""The one table of statistics, the counters that fill it, and its Prometheus text.

The router feeds a ``Statistics``; a ``Snapshot`` of it is plain data that may travel between processes;
``render`` turns snapshots of any number of engines into one page. Names starting with ``vllm:`` mean what
they mean there, so that foreign dashboards and benchmarks read them; ``dflash_`` names are ours.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from dflash_core.events import RoundReport

# Every consumer parses this version; it has no need of the negotiation that newer ones ask for.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. Every series also carries the labels ``model_name`` and ``engine``."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()

    @property
    def ray_name(self) -> str:
        """The name for Ray's own export, which allows no colon."""
        return self.name.replace(":", "_")


_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_PHASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_ACCEPTED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 15.0, 31.0)

METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", "gauge", "Requests that have a place in a window."),
    Metric("vllm:num_requests_waiting", "gauge", "Requests in the router's queue."),
    Metric("vllm:prompt_tokens_total", "counter", "Prompt tokens of admitted requests."),
    Metric("vllm:generation_tokens_total", "counter", "Tokens emitted, bonus tokens included."),
    Metric(
        "vllm:request_success_total",
        "counter",
        "Finished requests by reason: stop, length, abort (the client went away), error.",
        ("finished_reason",),
    ),
    Metric(
        "vllm:request_queue_time_seconds", "histogram", "Arrival to a place in a window.", buckets=_LATENCY
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Arrival to the first emitted token.",
        buckets=_LATENCY,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Gap between two outputs of one request; an output is all that one round committed.",
        buckets=_GAP,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Time per token after the first, one value per request.",
        buckets=_GAP,
    ),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "Arrival to the last token.", buckets=_LATENCY),
    Metric("vllm:spec_decode_num_drafts_total", "counter", "Row-rounds that had drafts."),
    Metric("vllm:spec_decode_num_draft_tokens_total", "counter", "Tokens drafted."),
    Metric("vllm:spec_decode_num_accepted_tokens_total", "counter", "Drafts accepted, without the bonus."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Drafts accepted at each position of the block, from 0.",
        ("position",),
    ),
    Metric("dflash_rounds_total", "counter", "Rounds played, all windows together."),
    Metric("dflash_row_rounds_total", "counter", "Rows times rounds."),
    Metric("dflash_walked_tokens_total", "counter", "Leading drafts that equal the target's own choice."),
    Metric("dflash_prefilled_tokens_total", "counter", "Prompt tokens run through the target."),
    Metric("dflash_row_failures_total", "counter", "Rows that ended by an error, by its kind.", ("kind",)),
    Metric("dflash_window_rows", "gauge", "Rows in the latest round."),
    Metric("dflash_window_rows_max", "gauge", "Most rows that ever shared a round."),
    Metric("dflash_round_rows", "histogram", "Rows per round.", buckets=_ROWS),
    Metric(
        "dflash_accepted_per_row_round",
        "histogram",
        "Drafts accepted by a row in a round that had drafts.",
        buckets=_ACCEPTED,
    ),
    Metric(
        "dflash_round_seconds",
        "histogram",
        "Time of a step of a window by phase: prefill, draft, verify, commit.",
        ("phase",),
        _PHASE,
    ),
)

_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

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
        for phase, seconds in report.seconds.items():
            self._observe("dflash_round_seconds", seconds, (phase,))
        if report.width == 0:  # the step only prefilled
            return
        self._add("dflash_rounds_total", 1)
        self._add("dflash_row_rounds_total", report.live_rows)
        self._set("dflash_window_rows", report.live_rows)
        most = self._values["dflash_window_rows_max"][()]
        self._set("dflash_window_rows_max", max(most, report.live_rows))
        self._observe("dflash_round_rows", report.live_rows)
        for row in report.rows:
            self._add("vllm:generation_tokens_total", len(row.tokens))
            if row.finish == "error":
                self._add("dflash_row_failures_total", 1, (row.error_kind or "internal_error",))
            if row.drafted:
                self._observe_drafts(row.drafted, row.walked, row.accepted)

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
        bounds = _BY_NAME[name].buckets
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
