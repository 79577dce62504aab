"""The router's process is killed: streams end, targets and drafters let go, and another router serves on."""

import os
import signal
import threading
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from deployments.client import CallFailed, ask
from deployments.client import Client as RpcClient
from deployments.inbox import NAMESPACE
from tests.deployments.ray_client import Client, call, generation, names, wait_until
from tests.deployments.test_http_disconnect import post

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

ENDS_S = 20.0  # a hung connection would last longer; `make faults` holds it to one second


def router_pid() -> int:
    from ray._private.state import actors

    table = cast(dict[str, dict[str, Any]], actors())
    return next(a["Pid"] for a in table.values() if "#Router#" in a["Name"] and a["State"] == "ALIVE")


def test_a_killed_router_ends_its_streams_and_leaves_nothing_behind(
    ray_cluster: int, grpc_port: int, fake_app: DeploymentHandle
) -> None:
    failures: list[CallFailed] = []

    def read(client: RpcClient) -> None:
        try:
            list(client.generate(ask("demo", [5, 6, 7], max_tokens=3000)))
        except CallFailed as error:
            failures.append(error)

    asked: dict[str, object] = {"model": "demo", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    asked["messages"] = [{"role": "user", "content": "Hi"}]
    with (
        RpcClient(f"127.0.0.1:{grpc_port}") as client,
        post(f"http://127.0.0.1:{ray_cluster}", asked) as stream,
    ):
        reading = threading.Thread(target=read, args=[client])
        reading.start()
        wait_until(lambda: call("Target", "stats")["rows"] == 2)
        stream.settimeout(ENDS_S)
        text = b""
        while b"data: " not in text:  # it has begun, so the proxy can only cut it
            text += stream.recv(65536)
        inboxes = set(names(NAMESPACE))
        os.kill(router_pid(), signal.SIGKILL)
        while part := stream.recv(65536):
            text += part
        reading.join(ENDS_S)
    assert b"[DONE]" not in text  # it does not look whole
    assert [failure.kind for failure in failures] == ["connection"]
    wait_until(lambda: call("Target", "stats")["windows"] == 0)
    assert call("Target", "stats")["rows"] == 0
    wait_until(lambda: call("Drafter", "stats")["sessions"] == 0)
    wait_until(lambda: not inboxes & set(names(NAMESPACE)))
    assert Client(generation()).start(fake_app).join().is_complete
