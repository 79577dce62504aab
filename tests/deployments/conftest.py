"""A Ray cluster of one's own: short temp directory, loopback, free ports, nothing left behind."""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deployments import proxy
from deployments.cluster import start_node
from deployments.rpc.options import grpc_options
from tests.deployments.fake_engine import RoundLog

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measured costs of this session's tests, not of the person who runs them."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def grpc_port() -> int:
    """Where ``ray_cluster`` serves gRPC."""
    return free_port()


@pytest.fixture(scope="session")
def ray_cluster(grpc_port: int) -> Iterator[int]:
    """Start Ray and Serve, once for all tests that need them; gives the HTTP port."""
    import ray
    from ray import serve

    # Replicas import the tests' own engine, wherever pytest was started.
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        **proxy.VARIABLES,
    }
    folder = tempfile.mkdtemp(prefix="dfs", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        start_node(
            print,
            attempts=3,
            num_cpus=8,  # logical: the tests scale up
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
        )
        port = free_port()
        try:
            serve.start(
                http_options={"host": "127.0.0.1", "port": port}, grpc_options=grpc_options(grpc_port)
            )
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def round_log(tmp_path_factory: pytest.TempPathFactory) -> RoundLog:
    """Rounds of ``fake_app``."""
    return RoundLog(tmp_path_factory.mktemp("rounds"))


@pytest.fixture(scope="session")
def fake_app(ray_cluster: int, round_log: RoundLog) -> "DeploymentHandle":
    """The scripted engine on Ray, started once. Modules that use it stand behind those with other models."""
    from tests.deployments.ray_client import deploy

    return deploy(log=round_log)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own, as beside a replica's MLX thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
