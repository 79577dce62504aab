"""The one table of statistics: every metric's name, type, help, labels and buckets.

Names starting with ``vllm:`` mean what they mean there, so that foreign dashboards and benchmarks read
them; ``dflash_`` names are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
    Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a place."),
    Metric("vllm:prompt_tokens_total", "counter", "Prompt tokens of admitted requests."),
    Metric(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Tokens of rows that were about to be read and were looked up among the saved prefixes.",
    ),
    Metric("vllm:prefix_cache_hits_total", "counter", "Of those, tokens that a saved prefix stood for."),
    Metric("dflash_prefix_bytes", "gauge", "Bytes of saved prefixes that the latest target to play holds."),
    Metric("vllm:generation_tokens_total", "counter", "Tokens of answers, bonus tokens included."),
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
    Metric("dflash_exchange_calls_total", "counter", "Draft calls from target to drafter.", ("transport",)),
    Metric("dflash_exchange_bytes_total", "counter", "Feature bytes sent with them.", ("transport",)),
    Metric("dflash_exchange_failures_total", "counter", "Drafts that did not come in time, or at all."),
    Metric(
        "dflash_drafter_mismatches_total",
        "counter",
        "Draft calls that met a drafter other than the one whose features the target makes.",
    ),
    Metric(
        "dflash_contexts_lost_total",
        "counter",
        "Rows that go on without drafts: the drafter lost their context, and feature_bytes was too small to "
        "keep what it is made from.",
    ),
    Metric(
        "dflash_probe_gap_logits",
        "gauge",
        "The probe's finding for rounds of so many slots at a width: tokens whose logits lie further apart "
        "keep their order. Verdicts: equal (no bit differs), near_tie, different.",
        ("slots", "width", "verdict"),
    ),
    Metric("dflash_routers_missing", "gauge", "Routers that did not answer when this one last asked them."),
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
        "Time of a step of a window by phase: prefill, draft, verify, commit; remote: a round elsewhere.",
        ("phase",),
        _PHASE,
    ),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
