"""A client that closes its socket, on real Ray Serve: its row is gone by the next round, nobody else's is."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from ray.serve.handle import DeploymentHandle

from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.fake_engine import PAIR, RoundLog, script
from tests.deployments.ray_client import call, wait_until
from tests.deployments.test_http_disconnect import post

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.ray]

SLOW_S = 0.4  # a round; a close that takes longer to reach the target would be a fault of ours


@pytest.fixture
def log(fake_app: DeploymentHandle, round_log: RoundLog) -> Iterator[RoundLog]:
    round_log.set_pace(SLOW_S)
    yield round_log
    round_log.set_pace(0.02)


MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def chat(max_tokens: int, **options: object) -> dict[str, object]:
    return {"model": "demo", "messages": MESSAGES, "max_tokens": max_tokens, "ignore_eos": True, **options}


def expected(max_tokens: int) -> list[int]:
    prompt = tuple(Tokenizer.load(PAIR / "target").apply_chat(MESSAGES))
    return [script(prompt, len(prompt) + i) for i in range(max_tokens)]


def read_all(client: socket.socket) -> bytes:
    client.settimeout(60)
    text = b""
    while b"[DONE]" not in text:
        part = client.recv(65536)
        assert part, f"the stream was cut: {text!r}"
        text += part
    return text


def token_ids(stream: bytes) -> list[int]:
    lines = stream.decode().splitlines()
    chunks: list[Any] = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids") or ()]


@pytest.mark.parametrize(("is_stream", "stays", "leaves"), [(True, 301, 2001), (False, 302, 2002)])
def test_a_row_whose_client_closed_its_socket_plays_at_most_one_more_round(
    log: RoundLog, ray_cluster: int, is_stream: bool, stays: int, leaves: int
) -> None:
    """Rounds are counted that began after the close: the one before whose start it may not have arrived."""
    url = f"http://127.0.0.1:{ray_cluster}"

    def rounds_of(budget: int, since: float = 0.0) -> int:
        return sum(began > since and budget in budgets for began, budgets in log.rounds())

    with (
        closing(post(url, chat(stays, stream=True, return_token_ids=True))) as other,
        closing(post(url, chat(leaves, stream=is_stream))) as leaver,
    ):
        wait_until(lambda: rounds_of(leaves) >= 3 and rounds_of(stays) >= 3)
        if is_stream:
            assert b"data: " in leaver.recv(65536)
        closed_at = time.monotonic()
        leaver.close()
        wait_until(lambda: rounds_of(stays, closed_at) >= 4)  # the other row plays on
        assert rounds_of(leaves, closed_at) <= 1
        log.set_pace(0.01)
        tokens = token_ids(read_all(other))
    assert tokens == expected(stays)
    wait_until(lambda: call("Target", "stats")["rows"] == 0, 5)
    health = call("Router", "health")
    assert (health["running"], health["waiting"]) == (0, 0)
