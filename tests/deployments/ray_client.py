"""Clients for tests against a running application: requests in threads, replicas found and killed."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.app import APP_NAME, assemble
from deployments.generation import Ended, Event, Generation, GenerationId, Started, TextTokens
from deployments.inbox import NAMESPACE
from deployments.settings import Settings
from dflash_core.request import Sampling
from tests.deployments.fake_engine import FakeEngine, RoundLog, script

SETTINGS = Settings(
    request_timeout_s=30.0, window_max_age_s=4.0, max_rows=4, max_queue=2, draft_timeout_s=0.5
)
_numbers = itertools.count()


def deploy(
    settings: Settings = SETTINGS, log: RoundLog | None = None, version: str | None = None
) -> DeploymentHandle:
    """Serve the scripted engine; every replica is a new one.

    But where ``version`` runs already: then, as with ``serve deploy``, only the numbers of replicas change.
    """
    drawn = "ray.serve._private.client.get_random_string"
    with patch(drawn, lambda: version) if version is not None else nullcontext():
        return serve.run(assemble(settings, FakeEngine(log=log)), name=APP_NAME, route_prefix="/")


def generation(
    prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 40, deadline_s: float = 60.0
) -> Generation:
    number = next(_numbers)
    return Generation(
        id=GenerationId(f"g{number}"),
        model="demo",
        prompt_ids=(*prompt, number),
        max_tokens=max_tokens,
        sampling=Sampling(),
        stop_token_ids=frozenset(),
        stop_strings=(),
        deadline_s=deadline_s,
    )


def expected(request: Generation) -> list[int]:
    start = len(request.prompt_ids)
    return [script(request.prompt_ids, start + i) for i in range(request.max_tokens)]


@dataclass
class Client:
    """One request, read in a thread of its own."""

    request: Generation
    events: list[Event] = field(default_factory=list)
    error: Exception | None = None
    thread: threading.Thread | None = None
    _response: Any = None

    def start(self, handle: DeploymentHandle) -> "Client":
        response = self._response = cast(Any, handle.options(stream=True).generate.remote(self.request))

        def read() -> None:
            try:
                for event in response:
                    self.events.append(event)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()
        return self

    def join(self, timeout_s: float = 60.0) -> "Client":
        assert self.thread is not None
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"{self.request.id}: no end after {timeout_s} s"
        return self

    def cancel(self) -> None:
        """Leave; what came until then stays."""
        self._response.cancel()

    @property
    def is_reading(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, TextTokens) for t in e.token_ids]

    @property
    def windows(self) -> list[str]:
        return [e.window for e in self.events if isinstance(e, Started)]

    @property
    def lanes(self) -> list[str]:
        return [e.lane for e in self.events if isinstance(e, Started)]

    @property
    def is_complete(self) -> bool:
        return (
            self.error is None
            and isinstance(self.events[-1], Ended)
            and self.tokens == expected(self.request)
        )


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def call(deployment: str, method: str, *args: Any) -> Any:
    handle = serve.get_deployment_handle(deployment, APP_NAME)
    return handle.options(method_name=method).remote(*args).result(timeout_s=30)


def kill_replica(deployment: str) -> None:
    """kill -9 of one replica's process."""
    prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#"
    _kill(next(name for name in names("serve") if name.startswith(prefix)), "serve")


def kill_inboxes() -> None:
    for name in names(NAMESPACE):
        _kill(name, NAMESPACE)


def num_stored_bytes() -> int:
    """Bytes of the objects that this process refers to; what Serve's own processes keep comes and goes."""
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=True)
    return sum(
        max(0, ref.object_size)
        for worker in stats.core_workers_stats
        if worker.pid == os.getpid()
        for ref in worker.object_refs
    )


def names(namespace: str) -> list[str]:
    actors = cast(list[dict[str, str]], ray.util.list_named_actors(all_namespaces=True))
    return [actor["name"] for actor in actors if actor["namespace"] == namespace]


def _kill(name: str, namespace: str) -> None:
    ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
