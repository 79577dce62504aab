"""Rules and board: valid, played by promtool, and about metrics that exist."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deployments.metric_table import BY_NAME
from tests.k8s.manifests import K8S, of_kind, tool

FOLDER = "overlays/two-lanes"
BOARD = K8S / "components" / "monitoring" / "board.json"
NAME = re.compile(r"\b(?:vllm:|dflash[_:])[a-z0-9_:]+")
BY = re.compile(r"\bby \(([^)]*)\)")
MATCHERS = re.compile(r"\{([^}]*)\}")
EVERYWHERE = {"model_name", "engine", "le"}


def groups() -> list[dict]:
    (rule,) = of_kind(FOLDER, "PrometheusRule")
    return rule["spec"]["groups"]


def rule_expressions() -> list[str]:
    return [rule["expr"] for group in groups() for rule in group["rules"]]


def board_expressions() -> list[str]:
    return [
        target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]
    ]


def recorded() -> set[str]:
    return {rule["record"] for group in groups() for rule in group["rules"] if "record" in rule}


def metric_of(name: str) -> str | None:
    """The row of the table that a series belongs to."""
    if name in BY_NAME:
        return None if BY_NAME[name].type == "histogram" else name
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in BY_NAME and BY_NAME[base].type == "histogram" else None


@pytest.mark.parametrize("expressions", [rule_expressions, board_expressions])
def test_every_metric_and_label_that_is_asked_for_exists(expressions) -> None:
    asked = 0
    for expression in expressions():
        names = set(NAME.findall(expression)) - recorded()
        rows = {name: metric_of(name) for name in names}
        assert all(rows.values()), (expression, rows)
        labels = {word.strip() for group in BY.findall(expression) for word in group.split(",")}
        labels |= {
            part.split("=")[0].strip(" !~")
            for group in MATCHERS.findall(expression)
            for part in group.split(",")
        }
        known = EVERYWHERE | {label for row in rows.values() if row for label in BY_NAME[row].labels}
        assert labels <= known | {"job"}, (expression, labels - known)
        asked += len(names)
    assert asked > 10


def test_a_name_that_is_not_in_the_table_would_be_found() -> None:
    assert metric_of("vllm:num_requests_walking") is None
    assert metric_of("dflash_round_seconds") is None  # a histogram has no series of its own name
    assert metric_of("dflash_round_seconds_bucket") == "dflash_round_seconds"
    assert metric_of("dflash_rounds_total_bucket") is None


def test_every_alert_says_what_is_wrong_and_how_grave_it_is() -> None:
    alerts = [rule for group in groups() for rule in group["rules"] if "alert" in rule]
    assert len(alerts) >= 6
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    words = ", ".join(
        f'{key}="{value}"' for key, value in {"model_name": "demo", "engine": "0", **labels}.items()
    )
    return {"series": f"{name}{{{words}}}", "values": values}


# alert, minutes until it must stand, series that bring it about
PLAYED = [
    ("DFlashNotScraped", 6, [{"series": 'up{job="dflash-metrics"}', "values": "0x20"}]),
    (
        "DFlashQueueStands",
        12,
        [series("vllm:num_requests_waiting", "3x20"), series("vllm:generation_tokens_total", "100x20")],
    ),
    ("DFlashQueueLong", 12, [series("vllm:num_requests_waiting", "9x20")]),
    (
        "DFlashRequestsFail",
        18,
        [
            series("vllm:request_success_total", "0+1x30", finished_reason="error"),
            series("vllm:request_success_total", "0+9x30", finished_reason="stop"),
        ],
    ),
    (
        "DFlashDrafterAway",
        12,
        [
            series("dflash_exchange_failures_total", "0+5x20"),
            series("vllm:spec_decode_num_drafts_total", "100x20"),
        ],
    ),
    ("DFlashDrafterMismatched", 8, [series("dflash_drafter_mismatches_total", "0+1x20")]),
    ("DFlashContextsLost", 15, [series("dflash_contexts_lost_total", "0+2x20")]),
    (
        "DFlashAcceptsLittle",
        45,
        [
            series("vllm:spec_decode_num_accepted_tokens_total", "0+60x60"),
            series("vllm:spec_decode_num_drafts_total", "0+600x60"),
        ],
    ),
]
WELL = [
    {"series": 'up{job="dflash-metrics"}', "values": "1x60"},
    series("vllm:num_requests_waiting", "9 0x59"),
    series("vllm:generation_tokens_total", "0+500x60"),
    series("vllm:request_success_total", "0+30x60", finished_reason="stop"),
    series("vllm:request_success_total", "0x60", finished_reason="error"),
    series("dflash_exchange_failures_total", "0x60"),
    series("dflash_contexts_lost_total", "0x60"),
    series("dflash_drafter_mismatches_total", "0x60"),
    series("vllm:spec_decode_num_drafts_total", "0+600x60"),
    series("vllm:spec_decode_num_accepted_tokens_total", "0+2600x60"),
]


@pytest.fixture
def promtool_files(tmp_path: Path) -> tuple[str, Path]:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    return tool("promtool"), tmp_path


def test_promtool_accepts_the_rules(promtool_files: tuple[str, Path]) -> None:
    promtool, folder = promtool_files
    run = subprocess.run(
        [promtool, "check", "rules", str(folder / "rules.yaml")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_each_alert_stands_when_it_should_and_none_on_a_good_day(promtool_files: tuple[str, Path]) -> None:
    promtool, folder = promtool_files
    tests = []
    for alert, minutes, given in PLAYED:
        tests.append(
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": f"{minutes}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        )
    quiet = {"expr": "count(ALERTS)", "eval_time": "50m", "exp_samples": []}
    tests.append({"interval": "1m", "input_series": WELL, "promql_expr_test": [quiet]})
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    assert {alert for alert, _, _ in PLAYED} == {
        r["alert"] for g in groups() for r in g["rules"] if "alert" in r
    }
    run = subprocess.run(
        [promtool, "test", "rules", str(folder / "tests.yaml")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_scrape_has_a_key_and_finds_its_service() -> None:
    (monitor,) = of_kind(FOLDER, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [s for s in of_kind(FOLDER, "Service") if wanted <= s["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in services] == ["dflash-metrics"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in services[0]["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "dflash-api-keys", "key": "metrics"}


def test_the_board_reaches_grafana_and_each_panel_has_its_own_place() -> None:
    (config,) = of_kind(FOLDER, "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(config["data"]["board.json"])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
