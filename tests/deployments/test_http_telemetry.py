"""The table of statistics and its page."""

import pickle
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments import naming, router
from deployments.messages import Traffic
from deployments.metric_table import METRICS
from deployments.settings import Settings
from deployments.telemetry import Statistics, render
from dflash_core.events import RoundReport, RowProgress
from dflash_core.request import RowId, WindowId
from tests.deployments.http_stub import tokenizer

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(*engines: Statistics) -> Samples:
    page = render(engine.snapshot() for engine in engines).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(page: Samples, name: str, engine: str = "0", **labels: str) -> float:
    return page[name, tuple(sorted({"model_name": "m", "engine": engine, **labels}.items()))]


def row(name: str, tokens: int, drafted: int, walked: int, accepted: int, **end: str) -> RowProgress:
    return RowProgress(RowId(name), tuple(range(tokens)), drafted, walked, accepted, **end)  # type: ignore[arg-type]


def report(
    *rows: RowProgress, width: int = 16, live: int | None = None, prefilled: int = 0, **seconds: float
) -> RoundReport:
    live_rows = len(rows) if live is None else live
    return RoundReport(WindowId("w"), 1, width, rows, live_rows, 0, prefilled, seconds)


@pytest.fixture
def statistics() -> Statistics:
    return Statistics("m", "0")


def test_a_round_counts_per_row_and_per_position(statistics: Statistics):
    statistics.observe_round(report(row("a", 4, 15, 5, 3), row("b", 1, 15, 0, 0)))
    statistics.observe_round(report(row("a", 2, 7, 1, 1), width=8))
    page = samples(statistics)
    assert value(page, "dflash_rounds_total") == 2
    assert value(page, "dflash_row_rounds_total") == 3
    assert value(page, "vllm:spec_decode_num_drafts_total") == 3
    assert value(page, "vllm:spec_decode_num_draft_tokens_total") == 37
    assert value(page, "dflash_walked_tokens_total") == 6
    assert value(page, "vllm:spec_decode_num_accepted_tokens_total") == 4
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(page, per_position, position=str(p)) for p in range(3)] == [2, 1, 1]
    assert not any(name == per_position and ("position", "3") in labels for name, labels in page)


def test_the_page_tells_whether_rows_shared_a_round(statistics: Statistics):
    statistics.observe_round(report(row("a", 1, 0, 0, 0), row("b", 1, 0, 0, 0)))
    statistics.observe_round(report(row("a", 1, 0, 0, 0)))
    page = samples(statistics)
    assert value(page, "dflash_window_rows") == 1
    assert value(page, "dflash_window_rows_max") == 2
    assert value(page, "dflash_round_rows_bucket", le="1.0") == 1
    assert value(page, "dflash_round_rows_bucket", le="2.0") == 2
    assert value(page, "dflash_round_rows_sum") == 3


def test_a_classic_round_counts_no_drafts(statistics: Statistics):
    statistics.observe_round(report(row("a", 1, 0, 0, 0), width=1))
    page = samples(statistics)
    assert value(page, "dflash_rounds_total") == 1
    assert value(page, "vllm:spec_decode_num_drafts_total") == 0
    assert value(page, "dflash_accepted_per_row_round_count") == 0


def test_a_step_that_only_prefilled_is_no_round(statistics: Statistics):
    statistics.observe_round(report(width=0, prefilled=512, prefill=0.25))
    page = samples(statistics)
    assert value(page, "dflash_prefilled_tokens_total") == 512
    assert value(page, "dflash_rounds_total") == 0
    assert value(page, "dflash_round_rows_count") == 0
    assert value(page, "dflash_round_seconds_sum", phase="prefill") == 0.25


def test_a_row_that_ends_with_its_prompt_is_part_of_no_round(statistics: Statistics):
    only = row("a", 1, 0, 0, 0, finish="length")
    statistics.observe_round(report(only, width=0, live=0, prefilled=5))
    statistics.observe_round(report(row("b", 4, 15, 3, 3), only, live=1, prefilled=5))
    page = samples(statistics)
    assert value(page, "dflash_rounds_total") == 1
    assert value(page, "dflash_row_rounds_total") == 1
    assert value(page, "dflash_window_rows_max") == 1
    assert value(page, "vllm:spec_decode_num_drafts_total") == 1


def test_a_row_that_fails_before_its_first_round_is_counted(statistics: Statistics):
    failed = row("a", 0, 0, 0, 0, finish="error", error="x", error_kind="context_length_exceeded")
    statistics.observe_round(report(failed, width=0, live=0))
    page = samples(statistics)
    assert value(page, "dflash_row_failures_total", kind="context_length_exceeded") == 1


def test_the_exchange_is_counted_by_transport(statistics: Statistics):
    statistics.observe_exchange(Traffic({"value": 3, "ref": 1}, {"value": 300, "ref": 9000}))
    statistics.observe_exchange(Traffic({"value": 1}, {"value": 100}, 2, 1, 4))
    page = samples(statistics)
    assert value(page, "dflash_exchange_calls_total", transport="value") == 4
    assert value(page, "dflash_exchange_bytes_total", transport="ref") == 9000
    assert value(page, "dflash_exchange_failures_total") == 2
    assert value(page, "dflash_drafter_mismatches_total") == 1
    assert value(page, "dflash_contexts_lost_total") == 4


def test_a_failed_row_is_counted_by_its_kind(statistics: Statistics):
    statistics.observe_round(report(row("a", 0, 0, 0, 0, finish="error", error="x", error_kind="row_failed")))
    assert value(samples(statistics), "dflash_row_failures_total", kind="row_failed") == 1


def test_a_request_is_followed_from_queue_to_end(statistics: Statistics):
    statistics.observe_waiting(3)
    statistics.observe_running(2)
    statistics.observe_admitted(prompt_tokens=100, queue_seconds=0.2)
    statistics.observe_tokens(1)
    statistics.observe_first_token(0.5)
    statistics.observe_tokens(20)
    statistics.observe_gap(0.03)
    statistics.observe_finished("stop", 2.5, first_token_seconds=0.5, completion_tokens=21)
    statistics.observe_finished("abort", 1.0)
    page = samples(statistics)
    assert value(page, "vllm:num_requests_waiting") == 3
    assert value(page, "vllm:num_requests_running") == 2
    assert value(page, "vllm:prompt_tokens_total") == 100
    assert value(page, "vllm:generation_tokens_total") == 21
    assert value(page, "vllm:request_queue_time_seconds_sum") == 0.2
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(page, "vllm:inter_token_latency_seconds_count") == 1
    assert value(page, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(page, "vllm:e2e_request_latency_seconds_sum") == 3.5
    reasons = {
        r: value(page, "vllm:request_success_total", finished_reason=r) for r in ("stop", "abort", "error")
    }
    assert reasons == {"stop": 1, "abort": 1, "error": 0}


def test_each_engine_has_its_own_series():
    one, two = Statistics("m", "0"), Statistics("m", "1")
    two.observe_round(report(row("a", 1, 15, 0, 0)))
    page = samples(one, two)
    assert value(page, "dflash_rounds_total", engine="0") == 0
    assert value(page, "dflash_rounds_total", engine="1") == 1


def test_buckets_are_cumulative_and_end_with_all(statistics: Statistics):
    for seconds in (0.001, 0.2, 1000.0):
        statistics.observe_first_token(seconds)
    page = samples(statistics)
    name = "vllm:time_to_first_token_seconds_bucket"
    found = {dict(labels)["le"]: count for (sample, labels), count in page.items() if sample == name}
    counts = [found[bound] for bound in sorted(found, key=float)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-2], found["+Inf"]) == (1, 2, 3)


def test_a_snapshot_travels_and_does_not_change(statistics: Statistics):
    before = statistics.snapshot()
    statistics.observe_round(report(row("a", 1, 15, 1, 1)))
    assert render([pickle.loads(pickle.dumps(before))]) == render([Statistics("m", "0").snapshot()])
    assert render([before]) != render([statistics.snapshot()])


def test_the_table_is_well_formed(statistics: Statistics):
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith(("vllm:", "dflash_"))
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert ":" not in metric.ray_name
        assert metric.help.endswith(".")
        assert (metric.buckets != ()) == (metric.type == "histogram")
        assert list(metric.buckets) == sorted(metric.buckets)
    page = render([statistics.snapshot()]).decode()
    types = {family.name: family.type for family in text_string_to_metric_families(page)}
    assert types == {metric.name.removesuffix("_total"): metric.type for metric in METRICS}


def test_the_probes_findings_are_gauges_and_the_latest_ones_hold(statistics: Statistics):
    statistics.observe_probe(
        {"1x1": {"verdict": "equal", "gap": 0.0}, "2x4": {"verdict": "equal", "gap": 0.0}}
    )
    statistics.observe_probe(
        {"1x1": {"verdict": "equal", "gap": 0.0}, "4x16": {"verdict": "near_tie", "gap": 0.125}}
    )
    page = samples(statistics)
    name = "dflash_probe_gap_logits"
    assert value(page, name, slots="1", width="1", verdict="equal") == 0
    assert value(page, name, slots="4", width="16", verdict="near_tie") == 0.125
    assert sum(sample == name for sample, _ in page) == 2


def test_a_router_counts_under_its_replicas_own_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers under one name would make counters jump, since a scrape meets one of them."""
    assert router._engine_name() == "0"  # outside Serve
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a1b2"))
    monkeypatch.setattr(naming.serve, "get_replica_context", lambda: context)
    engine = SimpleNamespace(open_router=lambda _: SimpleNamespace(tokenizer=tokenizer()))
    monkeypatch.setattr(router, "cluster_id", lambda: "c")
    monkeypatch.setattr(router, "remote_lanes", lambda settings, parts, cluster: [])
    replica = router.RouterReplica(Settings(), engine, None)  # type: ignore[arg-type]
    assert replica._statistics.snapshot().engine == "a1b2"
