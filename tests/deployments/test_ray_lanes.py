"""Several lanes over real Ray Serve with a scripted engine."""

import pytest

from deployments.generation import Ended
from deployments.settings import Place, Placement
from tests.deployments.fake_engine import BLOCK
from tests.deployments.ray_client import SETTINGS, Client, call, deploy, generation, wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240), pytest.mark.ray]


def test_one_drafter_drafts_for_the_windows_of_two_targets(ray_cluster: int) -> None:
    """The scripted drafter raises where rows or windows are mixed, and its targets go on without drafts."""
    placement = Placement(
        target=Place(replicas=2, num_cpus=0.5), drafter=Place(num_cpus=0.5), router=Place(num_cpus=0.5)
    )
    settings = SETTINGS.model_copy(
        update={"placement": placement, "request_timeout_s": 120.0, "draft_timeout_s": 30.0}
    )
    handle = deploy(settings)
    wait_until(lambda: call("Router", "health")["lanes"] == 2, 60)
    clients = [Client(generation(max_tokens=120)).start(handle) for _ in range(2 * settings.max_rows)]
    assert all(client.join(120).is_complete for client in clients)
    by_lane: dict[str, list[float]] = {}
    for client in clients:
        ended = client.events[-1]
        assert isinstance(ended, Ended)
        by_lane.setdefault(client.lanes[0], []).append(ended.usage.accepted)
    assert [len(rows) for rows in by_lane.values()] == [settings.max_rows] * 2
    # All drafts are right: a row whose every round had some accepts three tokens of four.
    assert all(min(rows) > 0.9 * 120 * (BLOCK - 1) / BLOCK for rows in by_lane.values()), by_lane
