"""Requests made to hurt, through Serve's own proxies: what ends there is refused as well as what passes."""

import json
import socket
import urllib.request
from contextlib import ExitStack, closing

import grpc
import httpx2
import pytest
from grpc import StatusCode
from ray.serve.handle import DeploymentHandle

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120), pytest.mark.ray]

BODY = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
).encode()


@pytest.fixture
def port(fake_app: DeploymentHandle, ray_cluster: int) -> int:
    return ray_cluster


def ask(port: int, *headers: bytes, path: bytes = b"/v1/chat/completions", method: bytes = b"POST") -> bytes:
    """Everything that comes back."""
    head = [method + b" " + path + b" HTTP/1.1", b"content-type: application/json", b"connection: close"]
    if not any(header.lower().startswith(b"host:") for header in headers):
        head.append(b"host: h")
    text = b"\r\n".join([*head, *headers, b"content-length: %d" % len(BODY), b"", BODY])
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as raw:
        raw.sendall(text)
        return b"".join(iter(lambda: raw.recv(65536), b""))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "header",
    [
        b"x-request-id: \xff\xfe",
        b"x-session-id: \xff",
        b"serve_multiplexed_model_id: \xff",
        b"serve-multiplexed-model-id: other",
        b"x-request-timeout-seconds: \xff",
        b"x-request-timeout-seconds: 0.000001",
        b"x-request-disconnect-disabled: \xff",
        b"authorization: Bearer \xff",
        b"host: [",
        b"cookie: " + b"x" * 8000,
    ],
)
def test_an_odd_header_costs_nobody_an_answer(port: int, header: bytes) -> None:
    answer = ask(port, header)
    assert status(answer) == 200, answer[:500]
    assert answer.lower().count(b"\r\nx-request-id: ") == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"GET", b"//"),
        (b"GET", b"/../../etc/passwd"),
        (b"GET", b"/%00"),
        (b"GET", b"/%ff%fe"),
        (b"GET", b"/nowhere?" + b"a" * 4000),
        (b"DELETE", b"/v1/chat/completions"),
        (b"TRACE", b"/v1/models"),
        (b"BREW", b"/health"),
    ],
)
def test_an_odd_path_or_method_is_a_client_error(port: int, method: bytes, path: bytes) -> None:
    answer = ask(port, path=path, method=method)
    assert 400 <= status(answer) < 500, answer[:500]
    assert b"Traceback" not in answer


def test_bodies_that_never_end_keep_nobody_out(port: int) -> None:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"host: h", b"content-type: application/json"]
    slow = b"\r\n".join([*head, b"content-length: 99", b"", b"{"])
    with ExitStack() as held:
        for _ in range(100):
            raw = held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=30)))
            raw.sendall(slow)
        assert status(ask(port)) == 200
    assert status(ask(port)) == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as response:
        assert json.load(response)["running"] == 0


def test_heads_that_never_end_keep_nobody_out(port: int) -> None:
    with ExitStack() as held:
        for _ in range(100):
            raw = held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=30)))
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-slow: ")
        assert [status(ask(port)) for _ in range(3)] == [200] * 3
    assert status(ask(port)) == 200


def test_ten_megabytes_are_too_large_and_refused_in_our_words(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    response = httpx2.post(url, content=b" " * 10 * 2**20, headers=headers, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert status(ask(port)) == 200


def test_bytes_that_are_no_message_are_an_invalid_argument_behind_rays_proxy_too(
    port: int, grpc_port: int
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        for wire in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"{}" * 999):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/dflash.v1.DFlashService/GenerateOnce")(wire, timeout=30)
            assert caught.value.code() == StatusCode.INVALID_ARGUMENT, caught.value
            assert ("error-kind", "invalid_request") in caught.value.trailing_metadata()
