"""The exchange over a real drafter replica: by reference, by value and by size give the same drafts."""

import asyncio
import os
from typing import Any, cast

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import app
from deployments.app import APP_NAME
from deployments.exchange.handle import HandleLink
from deployments.exchange.patience import Patience
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.transport import Transport
from deployments.proxy import GRPC_LIMIT_BYTES
from deployments.settings import Place, Settings
from deployments.settings import Transport as Mode
from dflash_core.request import RowId, RowRequest, WindowId
from tests.deployments.fake_engine import BLOCK, FakeWindow, Probe, script
from tests.deployments.ray_client import call, num_stored_bytes, wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.ray]

PROMPT = tuple(range(1500))  # 375 KiB of features
ROUNDS = 80  # enough to merge what they commit
SERVES_OWN_BYTES = 20_000  # Serve keeps small objects of its own; a prompt's features are 384,000
EXPECTED_CALLS = {"ref": {"ref"}, "value": {"value"}, "auto": {"ref", "value"}}


@pytest.fixture
def link(fake_app: DeploymentHandle) -> HandleLink:
    return HandleLink(serve.get_deployment_handle("Drafter", APP_NAME))


@pytest.mark.parametrize("mode", ["ref", "value", "auto"])
def test_transports_differ_in_nothing_but_the_way(
    link: HandleLink, loop: asyncio.AbstractEventLoop, mode: Mode
) -> None:
    drafter = RemoteDrafter(link, loop, Transport(mode, 256 * 1024), "fake", BLOCK, Patience(10.0, 10.0))
    window = FakeWindow(WindowId(f"w-{mode}"), drafter, 8, 0.0)
    before = num_stored_bytes()
    for name in ("a", "b"):
        window.admit(RowRequest(RowId(name), PROMPT, 2000))
    reports = [window.step() for _ in range(ROUNDS)]

    # Every draft is right, so every context is whole and in order.
    assert all(row.accepted == BLOCK - 1 for report in reports for row in report.rows)
    emitted = [t for report in reports for row in report.rows if row.row_id == "a" for t in row.tokens]
    assert emitted == [script(PROMPT, len(PROMPT) + i) for i in range(ROUNDS * BLOCK)]
    traffic = drafter.transport.take_traffic()
    assert set(traffic.calls) == EXPECTED_CALLS[mode]
    assert traffic.failures == 0
    assert (drafter.num_refs > 0) == (mode != "value")
    assert (num_stored_bytes() > before + SERVES_OWN_BYTES) == (mode != "value")

    window.retire(RowId("a"))
    window.step()
    window.retire(RowId("b"))
    assert drafter.num_refs == 0
    window.close()
    wait_until(lambda: num_stored_bytes() < before + SERVES_OWN_BYTES, 30)
    wait_until(lambda: call("Drafter", "stats")["sessions"] == 0, 5)


def test_levers_reach_the_processes_that_they_are_for(ray_cluster: int) -> None:
    options = app._options(Settings(blas_threads=3), Place(num_cpus=0.1), wants_blas=True)
    probe = serve.deployment(name="Probe", **options)(Probe).bind()
    facts = cast(Any, serve.run(probe, name="probe", route_prefix=None)).facts.remote().result()
    serve.delete("probe")
    assert facts == {
        "own_thread": False,
        "own_loop": False,
        "grpc_limit": GRPC_LIMIT_BYTES,
        "blas": "3",
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
