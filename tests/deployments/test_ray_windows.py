"""Windows over real Ray Serve with a scripted engine: who shares, who waits, who is refused, who survives."""

import time
from typing import Any, cast

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.app import APP_NAME, assemble
from deployments.generation import Ended, TextTokens
from deployments.inbox import RemoteInbox
from deployments.messages import Opened, Opening, Refused
from deployments.settings import Place, Placement, Settings
from dflash_core.errors import DeadlineExceeded, QueueFull
from dflash_core.request import WindowId
from tests.deployments.fake_engine import BLOCK, FakeEngine
from tests.deployments.ray_client import (
    Client,
    call,
    generation,
    kill_inboxes,
    kill_replica,
    wait_until,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

SETTINGS = Settings(
    request_timeout_s=30.0, window_max_age_s=4.0, max_rows=4, max_queue=2, draft_timeout_s=0.5
)


def deploy(settings: Settings = SETTINGS, round_s: float = 0.02) -> DeploymentHandle:
    app = assemble(settings, FakeEngine(round_s))
    return serve.run(app, name=APP_NAME, route_prefix="/")


@pytest.fixture(scope="module")
def handle(ray_cluster: int) -> DeploymentHandle:
    return deploy()


def test_concurrent_requests_share_one_window(handle: DeploymentHandle) -> None:
    clients = [Client(generation(max_tokens=60)).start(handle) for _ in range(4)]
    assert all(client.join().is_complete for client in clients)
    assert len({client.windows[0] for client in clients}) == 1


def test_light_load_uses_the_same_window_again(handle: DeploymentHandle) -> None:
    first = Client(generation(max_tokens=8)).start(handle).join()
    second = Client(generation(max_tokens=8)).start(handle).join()
    assert first.is_complete
    assert second.is_complete
    assert first.windows == second.windows


def test_a_window_of_full_age_takes_no_joins_and_runs_out(handle: DeploymentHandle) -> None:
    old = Client(generation(max_tokens=1600)).start(handle)  # 400 rounds of 20 ms: longer than joins last
    wait_until(lambda: old.windows)
    time.sleep(SETTINGS.window_max_age_s + 0.2)
    new = Client(generation(max_tokens=20)).start(handle).join()
    assert old.join().is_complete
    assert new.is_complete
    assert new.windows[0] != old.windows[0]
    assert len(old.windows) == 1


def test_drafts_are_spoken_for_in_the_usage(handle: DeploymentHandle) -> None:
    end = Client(generation(max_tokens=4 * BLOCK)).start(handle).join().events[-1]
    assert isinstance(end, Ended)
    assert end.usage.completion_tokens == 4 * BLOCK
    assert end.usage.drafted == end.usage.accepted == 4 * (BLOCK - 1)


def test_a_full_queue_says_when_to_come_back(handle: DeploymentHandle) -> None:
    running = [Client(generation(max_tokens=400)).start(handle) for _ in range(4)]
    wait_until(lambda: all(client.windows for client in running))
    waiting = [Client(generation(max_tokens=8)).start(handle) for _ in range(2)]
    wait_until(lambda: call("Router", "health")["waiting"] == 2)
    refused = Client(generation()).start(handle).join(5)
    assert isinstance(refused.error, QueueFull)
    assert refused.error.retry_after >= 1
    assert all(client.join().is_complete for client in [*running, *waiting])


def test_a_deadline_ends_a_request_and_frees_its_row(handle: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=4000, deadline_s=0.5)).start(handle).join(10)
    assert isinstance(client.error, DeadlineExceeded)
    wait_until(lambda: call("Target", "stats")["rows"] == 0, 2)


def test_a_client_that_leaves_is_out_by_the_next_round(handle: DeploymentHandle) -> None:
    stays = Client(generation(max_tokens=800)).start(handle)
    response = cast(Any, handle.options(stream=True).generate.remote(generation(max_tokens=4000)))
    seen = 0
    for event in response:
        seen += isinstance(event, TextTokens)
        if seen == 3:
            response.cancel()
            break
    began = time.monotonic()
    wait_until(lambda: call("Target", "stats")["rows"] == 1, 5)
    assert time.monotonic() - began < 1.0
    assert stays.join().is_complete


def test_a_third_window_is_refused_by_a_full_replica(handle: DeploymentHandle) -> None:
    target = serve.get_deployment_handle("Target", APP_NAME).options(stream=True)
    inbox = RemoteInbox.start()
    calls = [cast(Any, target.play.remote(Opening(WindowId(f"extra-{i}"), ()), inbox)) for i in range(3)]
    answers = [next(c) for c in calls]
    for c in calls:
        c.cancel()
    assert sum(isinstance(answer, Opened) for answer in answers) in (1, 2)  # the router's own may be open
    assert isinstance(answers[-1], Refused)
    wait_until(lambda: call("Target", "stats")["windows"] <= 1, 5)


def test_a_killed_drafter_costs_drafts_and_nothing_else(handle: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=1600)).start(handle)
    wait_until(lambda: len(client.tokens) > 40)
    kill_replica("Drafter")
    wait_until(lambda: _widths(client)[-3:] == [1, 1, 1], 10)
    wait_until(lambda: _widths(client)[-3:] == [BLOCK] * 3 or not client.is_reading, 30)
    assert _widths(client)[-2] == BLOCK, "speculation did not resume"
    assert client.join().is_complete
    assert len(client.windows) == 1


def test_a_killed_target_costs_a_pause_and_no_token(handle: DeploymentHandle) -> None:
    clients = [Client(generation(max_tokens=400)).start(handle) for _ in range(3)]
    wait_until(lambda: all(len(client.tokens) > 40 for client in clients))
    kill_replica("Target")
    assert all(client.join().is_complete for client in clients)
    assert all(len(set(client.lanes)) == 2 for client in clients)


def test_a_lost_inbox_is_replaced(handle: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=400)).start(handle)
    wait_until(lambda: len(client.tokens) > 40)
    kill_inboxes()
    assert client.join().is_complete
    assert Client(generation()).start(handle).join().is_complete


def test_scaling_up_leaves_open_windows_alone(handle: DeploymentHandle) -> None:
    before = [Client(generation(max_tokens=1600)).start(handle) for _ in range(2)]
    wait_until(lambda: all(client.windows for client in before))
    two = Place(replicas=2, num_cpus=0.5)
    deploy(SETTINGS.model_copy(update={"placement": Placement(target=two, drafter=two)}))
    during = [Client(generation(max_tokens=80)).start(handle) for _ in range(2)]
    assert all(client.join().is_complete for client in [*before, *during])
    assert all(len(client.windows) == 1 for client in before)


def test_an_upgrade_under_open_windows_loses_nothing(handle: DeploymentHandle) -> None:
    before = [Client(generation(max_tokens=1200)).start(handle) for _ in range(3)]
    wait_until(lambda: all(client.windows for client in before))
    again = deploy(SETTINGS.model_copy(update={"max_queue": 3}))
    after = [Client(generation(max_tokens=80)).start(again) for _ in range(3)]
    assert all(client.join().is_complete for client in [*before, *after])
    assert all(len(client.windows) == 1 for client in before)
    assert {c.lanes[0] for c in before}.isdisjoint(c.lanes[0] for c in after)


def _widths(client: Client) -> list[int]:
    return [len(e.token_ids) for e in client.events if isinstance(e, TextTokens)]
