"""Windows over real Ray Serve with a scripted engine: who shares, who waits, who is refused, who survives."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx2
import pytest
from grpc import StatusCode
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import client as rpc
from deployments.app import APP_NAME
from deployments.draining import drain
from deployments.generation import Ended, TextTokens
from deployments.inbox import RemoteInbox
from deployments.messages import Opened, Opening, Refused
from deployments.settings import Place, Placement, Settings
from dflash_core.errors import DeadlineExceeded, QueueFull
from dflash_core.request import WindowId
from tests.deployments.fake_engine import BLOCK, RoundLog
from tests.deployments.ray_client import (
    SETTINGS,
    Client,
    call,
    deploy,
    expected,
    generation,
    kill_inboxes,
    kill_replica,
    wait_until,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.ray]


SLOW_S = 0.4  # a round; a cancel that takes longer to reach the target would be a fault of ours


@pytest.fixture
def slow(round_log: RoundLog) -> Iterator[RoundLog]:
    """Nobody ends while replicas come and go, and rounds can be counted."""
    round_log.set_pace(SLOW_S)
    yield round_log
    round_log.set_pace(0.02)


def test_concurrent_requests_share_one_window(fake_app: DeploymentHandle) -> None:
    clients = [Client(generation(max_tokens=60)).start(fake_app) for _ in range(4)]
    assert all(client.join().is_complete for client in clients)
    assert len({client.windows[0] for client in clients}) == 1


def test_light_load_uses_the_same_window_again(fake_app: DeploymentHandle) -> None:
    first = Client(generation(max_tokens=8)).start(fake_app).join()
    second = Client(generation(max_tokens=8)).start(fake_app).join()
    assert first.is_complete
    assert second.is_complete
    assert first.windows == second.windows


def test_a_window_of_full_age_takes_joins_while_it_has_rows_and_its_lane_is_there(
    fake_app: DeploymentHandle,
) -> None:
    old = Client(generation(max_tokens=1600)).start(fake_app)  # 400 rounds of 20 ms: longer than its age
    wait_until(lambda: old.windows)
    time.sleep(SETTINGS.window_max_age_s + 0.2)
    new = Client(generation(max_tokens=20)).start(fake_app).join()
    assert old.join().is_complete
    assert new.is_complete
    assert new.windows == old.windows


def test_drafts_are_spoken_for_in_the_usage(fake_app: DeploymentHandle) -> None:
    end = Client(generation(max_tokens=4 * BLOCK)).start(fake_app).join().events[-1]
    assert isinstance(end, Ended)
    assert end.usage.completion_tokens == 4 * BLOCK
    assert end.usage.drafted == end.usage.accepted == 4 * (BLOCK - 1)


def test_a_full_queue_says_when_to_come_back(fake_app: DeploymentHandle, round_log: RoundLog) -> None:
    round_log.set_pace(0.3)  # nobody ends while the queue is looked at, however busy the machine
    running = [Client(generation(max_tokens=400)).start(fake_app) for _ in range(4)]
    wait_until(lambda: all(client.windows for client in running))
    waiting = [Client(generation(max_tokens=8)).start(fake_app) for _ in range(2)]
    wait_until(lambda: call("Router", "health")["waiting"] == 2)
    refused = Client(generation()).start(fake_app).join(5)
    assert isinstance(refused.error, QueueFull)
    assert refused.error.retry_after >= 1
    round_log.set_pace(0.02)
    assert all(client.join().is_complete for client in [*running, *waiting])


def test_a_deadline_ends_a_request_and_frees_its_row(fake_app: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=4000, deadline_s=0.5)).start(fake_app).join(10)
    assert isinstance(client.error, DeadlineExceeded)
    wait_until(lambda: call("Target", "stats")["rows"] == 0, 2)


def test_a_client_that_leaves_is_out_by_the_next_round(fake_app: DeploymentHandle) -> None:
    stays = Client(generation(max_tokens=800)).start(fake_app)
    response = cast(Any, fake_app.options(stream=True).generate.remote(generation(max_tokens=4000)))
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


def test_a_third_window_is_refused_by_a_full_replica(fake_app: DeploymentHandle) -> None:
    target = serve.get_deployment_handle("Target", APP_NAME).options(stream=True)
    inbox = RemoteInbox.start()
    calls = [cast(Any, target.play.remote(Opening(WindowId(f"extra-{i}"), ()), inbox)) for i in range(3)]
    answers = [next(c) for c in calls]
    for c in calls:
        c.cancel()
    num_opened = sum(isinstance(answer, Opened) for answer in answers)  # in whatever order they arrived
    assert num_opened in (1, 2)  # the router's own may be open
    assert sum(isinstance(answer, Refused) for answer in answers) == 3 - num_opened
    wait_until(lambda: call("Target", "stats")["windows"] <= 1, 5)


def test_a_killed_drafter_costs_drafts_and_nothing_else(fake_app: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=1600)).start(fake_app)
    wait_until(lambda: len(client.tokens) > 40)
    kill_replica("Drafter")
    wait_until(lambda: _widths(client)[-3:] == [1, 1, 1], 10)
    wait_until(lambda: _widths(client)[-3:] == [BLOCK] * 3 or not client.is_reading, 30)
    assert _widths(client)[-2] == BLOCK, "speculation did not resume"
    assert client.join().is_complete
    assert len(client.windows) == 1


def test_drafts_are_back_within_two_rounds_of_a_drafters_being_ready(
    fake_app: DeploymentHandle, round_log: RoundLog
) -> None:
    client = Client(generation(max_tokens=800)).start(fake_app)
    wait_until(lambda: len(client.tokens) > 40)
    round_log.set_pace(1.0)  # beside which a ping, and what Serve needs to tell of a replica, are nothing
    kill_replica("Drafter")
    wait_until(lambda: _widths(client)[-2:] == [1, 1])
    wait_until(lambda: _answers("Drafter"))
    num_before = len(_widths(client))
    wait_until(lambda: BLOCK in _widths(client)[num_before:])
    round_log.set_pace(0.02)
    assert _widths(client)[num_before:].index(BLOCK) <= 2
    assert client.join().is_complete


def test_a_row_whose_target_does_not_come_back_in_time_ends_at_its_deadline(
    fake_app: DeploymentHandle, round_log: RoundLog
) -> None:
    client = Client(generation(max_tokens=4000, deadline_s=8.0)).start(fake_app)
    wait_until(lambda: len(client.tokens) > 8)
    with round_log.held():
        kill_replica("Target")
        client.join()
    assert isinstance(client.error, DeadlineExceeded)
    assert client.tokens == expected(client.request)[: len(client.tokens)]
    health = call("Router", "health")
    assert (health["running"], health["waiting"]) == (0, 0)
    assert Client(generation()).start(fake_app).join().is_complete


def test_a_killed_target_costs_a_pause_and_no_token(fake_app: DeploymentHandle) -> None:
    clients = [Client(generation(max_tokens=400)).start(fake_app) for _ in range(3)]
    wait_until(lambda: all(len(client.tokens) > 40 for client in clients))
    kill_replica("Target")
    assert all(client.join().is_complete for client in clients)
    assert all(len(set(client.lanes)) == 2 for client in clients)


def test_a_lost_inbox_is_replaced(fake_app: DeploymentHandle) -> None:
    client = Client(generation(max_tokens=400)).start(fake_app)
    wait_until(lambda: len(client.tokens) > 40)
    kill_inboxes()
    assert client.join().is_complete
    assert Client(generation()).start(fake_app).join().is_complete


def test_an_upgrade_under_open_windows_loses_nothing_and_who_leaves_is_gone(
    fake_app: DeploymentHandle, slow: RoundLog
) -> None:
    before = [
        Client(generation(max_tokens=800 + number, deadline_s=120.0)).start(fake_app) for number in range(4)
    ]
    wait_until(lambda: all(client.windows for client in before))
    leaver, *stay = before
    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(deploy, SETTINGS.model_copy(update={"max_queue": 3}), slow)
        wait_until(lambda: _num_stopping("Router") and _num_stopping("Target"))
        _assert_leaves(leaver, stay[0], slow)
        assert _num_stopping("Target")
        slow.set_pace(0.005)  # they end well within what a stopping replica is given
        again = upgrade.result(90)
    after = [Client(generation(max_tokens=80)).start(again) for _ in range(3)]
    assert all(client.join().is_complete for client in [*stay, *after])
    assert all(len(client.windows) == 1 for client in before)
    assert {c.lanes[0] for c in before}.isdisjoint(c.lanes[0] for c in after)


def test_scaling_up_leaves_open_windows_alone_and_rows_join_and_leave_them(
    ray_cluster: int, slow: RoundLog
) -> None:
    one, two = (Place(replicas=number, num_cpus=0.5) for number in (1, 2))
    handle = deploy(_placed(one), slow, version="scaled")
    before = [Client(generation(max_tokens=1200 + number)).start(handle) for number in range(2)]
    wait_until(lambda: all(client.windows for client in before))
    deploy(_placed(two), slow, version="scaled")
    wait_until(lambda: call("Router", "health")["lanes"] == 2)
    leaver, stays = before
    _assert_leaves(leaver, stays, slow)
    # They fill the new lane and what is free in the window that is open since before.
    joining = [Client(generation(max_tokens=80)).start(handle) for _ in range(2 * SETTINGS.max_rows - 1)]
    wait_until(lambda: all(client.windows for client in joining))
    assert sum(client.windows == stays.windows for client in joining) == SETTINGS.max_rows - 1
    slow.set_pace(0.02)
    assert all(client.join().is_complete for client in [stays, *joining])
    assert all(len(client.windows) == 1 for client in [*before, *joining])


def test_two_targets_play_two_full_windows_at_once() -> None:
    handle = serve.get_app_handle(APP_NAME)  # scaled up by the test before
    wait_until(lambda: call("Router", "health")["lanes"] == 2, 10)
    clients = [Client(generation(max_tokens=400)).start(handle) for _ in range(2 * SETTINGS.max_rows)]
    wait_until(lambda: all(client.windows for client in clients), 10)
    health = call("Router", "health")
    assert (health["running"], health["waiting"]) == (2 * SETTINGS.max_rows, 0)
    assert all(client.join().is_complete for client in clients)
    lanes = [client.lanes[0] for client in clients]
    assert sorted(lanes.count(lane) for lane in set(lanes)) == [SETTINGS.max_rows] * 2


def test_an_application_is_drained_before_its_routes_go(
    ray_cluster: int, grpc_port: int, fake_app: DeploymentHandle, round_log: RoundLog
) -> None:
    url = f"http://127.0.0.1:{ray_cluster}"
    round_log.set_pace(0.3)  # it runs until all have been refused, however busy the machine
    running = Client(generation(max_tokens=600)).start(fake_app)
    wait_until(lambda: running.windows)
    draining = threading.Thread(target=lambda: ended.append(drain(APP_NAME, 60)))
    ended: list[bool] = []
    draining.start()
    wait_until(lambda: httpx2.get(f"{url}/health").json()["status"] == "draining", 5)
    refused = httpx2.post(f"{url}/v1/completions", json={"model": "demo", "prompt": "Hi", "max_tokens": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert refused.headers["retry-after"]
    spec = rpc.ask("demo", "Hi", max_tokens=4)
    with rpc.Client(f"127.0.0.1:{grpc_port}") as client:
        for way in (lambda: client.generate_once(spec), lambda: list(client.generate(spec))):
            with pytest.raises(rpc.CallFailed) as failed:
                way()
            assert (failed.value.code, failed.value.kind) == (StatusCode.UNAVAILABLE, "unavailable")
            assert failed.value.retry_after
    assert not ended
    round_log.set_pace(0.02)
    draining.join(30)
    assert ended == [True]
    assert running.join(5).is_complete
    deploy(log=round_log)  # what others find


def _answers(deployment: str) -> bool:
    try:
        return bool(call(deployment, "stats"))
    except (RayError, RayServeException):
        return False


def _widths(client: Client) -> list[int]:
    return [len(e.token_ids) for e in client.events if isinstance(e, TextTokens)]


def _placed(place: Place) -> Settings:
    """So many targets and drafters; their processes are the same for any number."""
    placement = Placement(target=place, drafter=place)
    return SETTINGS.model_copy(update={"placement": placement, "blas_threads": 1})


def _num_stopping(deployment: str) -> int:
    """Replicas that drain."""
    client = _get_global_client()  # not ``serve.status``, which must not run beside ``serve.run``
    assert client is not None
    details = client.get_serve_details()["applications"][APP_NAME]["deployments"][deployment]
    return sum(replica["state"] == "STOPPING" for replica in details["replicas"])


def _assert_leaves(leaver: Client, stays: Client, log: RoundLog) -> None:
    """One cancels, and has hardly a round more although its window plays on."""

    def num_rounds(client: Client) -> int:
        return sum(began > left_at and client.request.max_tokens in rows for began, rows in log.rounds())

    left_at = time.monotonic()
    leaver.cancel()
    wait_until(lambda: num_rounds(stays) >= 6)
    assert num_rounds(leaver) <= 2
