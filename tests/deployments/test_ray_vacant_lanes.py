"""Serve scales targets and drafters by what they have to do, up and down, and no row notices."""

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.app import APP_NAME, assemble
from deployments.generation import Ended
from deployments.settings import Place, Placement
from tests.deployments.fake_engine import BLOCK, FakeEngine, RoundLog
from tests.deployments.ray_client import SETTINGS, Client, deploy, generation, wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300), pytest.mark.ray]

ONE_OR_TWO = Place(replicas=1, max_replicas=2, num_cpus=0.5, downscale_delay_s=1.0)
# One lane asks for less of a drafter's time than Serve lets it give, two lanes for more.
ENGINE = FakeEngine(round_s=0.04, draft_s=0.02)


def num_running(deployment: str) -> int:
    """Replicas, as Serve has them."""
    states = serve.status().applications[APP_NAME].deployments[deployment].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def share_drafted(client: Client) -> float:
    """Tokens that were accepted drafts, of those that could be."""
    ended = client.events[-1]
    assert isinstance(ended, Ended)
    return ended.usage.accepted / (ended.usage.completion_tokens * (BLOCK - 1) / BLOCK)


def test_a_queue_brings_a_second_lane_and_its_end_takes_it_away(
    fake_app: DeploymentHandle, round_log: RoundLog
) -> None:
    placement = Placement(target=ONE_OR_TWO, drafter=ONE_OR_TWO)
    settings = SETTINGS.model_copy(
        update={"placement": placement, "max_queue": 8, "request_timeout_s": 120.0}
    )
    handle = serve.run(assemble(settings, ENGINE), name=APP_NAME, route_prefix="/")
    assert (num_running("Target"), num_running("Drafter")) == (1, 1)
    clients: list[Client] = []

    def start(num_rows: int, max_tokens: int) -> list[Client]:
        asked = [generation(max_tokens=max_tokens, deadline_s=120.0) for _ in range(num_rows)]
        return [Client(request).start(handle) for request in asked]

    def is_scaled_up_under_load() -> bool:
        clients.extend(start(SETTINGS.max_rows + 3 - sum(c.is_reading for c in clients), max_tokens=200))
        lanes = {lane for client in clients if client.is_reading for lane in client.lanes}
        return len(lanes) == 2 and num_running("Drafter") == 2

    wait_until(is_scaled_up_under_load, 90)
    assert all(client.join().is_complete for client in clients)

    # Both lanes full, then a row each: one lane is enough, and the other goes when its row has ended.
    clients = start(2 * SETTINGS.max_rows, max_tokens=1600)
    wait_until(lambda: all(client.lanes for client in clients))
    kept = list({client.lanes[0]: client for client in clients}.values())
    assert len(kept) == 2
    for client in clients:
        if client not in kept:
            client.cancel()
    wait_until(lambda: num_running("Target") == 1, 60)
    wait_until(lambda: num_running("Drafter") == 1, 60)
    assert any(client.is_reading for client in kept)  # neither end waited for them
    assert all(client.join().is_complete for client in kept)
    assert all(len(client.windows) == 1 for client in kept)
    assert all(share_drafted(client) > 0.9 for client in kept)
    deploy(log=round_log)  # what others find
