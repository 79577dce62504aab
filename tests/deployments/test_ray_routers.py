"""Two routers of one application: whichever is asked shows both."""

import time

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.handle import DeploymentHandle

from deployments.settings import Place, Placement
from deployments.view import row_label
from tests.deployments.ray_client import (
    SETTINGS,
    Client,
    call,
    deploy,
    expected,
    generation,
    kill_replica,
    wait_until,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.ray]

Metrics = dict[str, dict[str, float]]  # by name, then engine


@pytest.fixture(scope="module")
def two_routers(ray_cluster: int) -> DeploymentHandle:
    """Each with room for all clients of a test: Serve sends them where chance wills."""
    two = Placement(router=Place(replicas=2, num_cpus=0.5))
    return deploy(SETTINGS.model_copy(update={"placement": two, "max_rows": 16}))


def metrics(page: str) -> Metrics:
    series: Metrics = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if set(sample.labels) == {"model_name", "engine"}:
                series.setdefault(sample.name, {})[sample.labels["engine"]] = sample.value
    return series


def scrape(port: int) -> Metrics:
    response = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
    assert response.status_code == 200
    return metrics(response.text)


def test_one_scrape_shows_the_series_of_both(ray_cluster: int, two_routers: DeploymentHandle) -> None:
    def tokens() -> dict[str, float]:
        return scrape(ray_cluster)["vllm:generation_tokens_total"]

    def play() -> bool:
        assert Client(generation(max_tokens=8)).start(two_routers).join().is_complete
        time.sleep(0.5)  # a view is kept for less
        return min(tokens().values()) > 0 and len(tokens()) == 2

    wait_until(play, 60)  # until chance has sent one to each
    assert {sum(tokens().values()) for _ in range(6)} == {sum(tokens().values())}
    pages = [set(tokens()) for _ in range(6)]  # whichever of them answers
    assert all(page == pages[0] for page in pages)


def test_the_console_shows_the_windows_of_both(ray_cluster: int, two_routers: DeploymentHandle) -> None:
    clients = [Client(generation(max_tokens=600)).start(two_routers) for _ in range(6)]
    wait_until(lambda: all(client.windows for client in clients))
    labels = {row_label(client.request.row_id()) for client in clients}

    def rows() -> set[str]:
        state = httpx2.get(f"http://127.0.0.1:{ray_cluster}/console/state", timeout=10).json()
        rounds = [played for r in state["routers"] for w in r["windows"] for played in w["rounds"]]
        return {row[0] for played in rounds for row in played["rows"]}

    wait_until(lambda: rows() >= labels, 10)
    assert all(client.join().is_complete for client in clients)


def test_a_killed_router_is_left_out_and_comes_back(ray_cluster: int, two_routers: DeploymentHandle) -> None:
    before = set(scrape(ray_cluster)["dflash_rounds_total"])
    assert len(before) == 2
    kill_replica("Router")
    wait_until(lambda: _engines(ray_cluster) - before and len(_engines(ray_cluster)) == 2, 60)
    assert len(_engines(ray_cluster) & before) == 1


def test_streams_of_a_killed_router_end_at_once_and_leave_no_row(two_routers: DeploymentHandle) -> None:
    def counts() -> tuple[int, int]:
        target = call("Target", "stats")
        return target["windows"], target["rows"]

    clients: list[Client] = []

    def do_all_play() -> bool:
        return all(len(client.tokens) > 40 for client in clients)

    wait_until(lambda: counts() == (0, 0), 30)
    while counts()[0] < 2:  # until both routers play
        clients += [Client(generation(max_tokens=1800)).start(two_routers) for _ in range(4)]
        wait_until(do_all_play)
    kill_replica("Router")
    wait_until(lambda: any(client.error for client in clients), 10)
    ended = [client.join() for client in clients]
    assert all(client.is_complete != (client.error is not None) for client in ended)
    assert all(client.tokens == expected(client.request)[: len(client.tokens)] for client in ended)
    wait_until(lambda: counts() == (0, 0), 30)
    assert call("Drafter", "stats")["sessions"] == 0


def _engines(port: int) -> set[str]:
    """Engines of a page; none if it was the dead one that was asked."""
    response = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
    return set(metrics(response.text)["dflash_rounds_total"]) if response.status_code == 200 else set()
