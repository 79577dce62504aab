"""The smg gateway in front of us: OpenAI's chats come in there, and reach us as token ids over gRPC."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest

from deployments.settings import Settings
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.conftest import free_port
from tests.deployments.fake_engine import PAIR, RoundLog, script
from tests.deployments.ray_client import call, deploy, wait_until

pytest.importorskip("smg_grpc_proto")
pytest.importorskip("smg")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150), pytest.mark.ray]

SETTINGS = Settings(request_timeout_s=30.0, window_max_age_s=4.0, max_rows=4, draft_timeout_s=0.5)
MODEL = "dflash-embedded"  # the gateway learns of the model's own name, not of its aliases
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RoundLog:
    return RoundLog(tmp_path_factory.mktemp("rounds"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the router writes a line for each call."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def app(ray_cluster: int, grpc_port: int, log: RoundLog, logs: Path) -> str:
    deploy(SETTINGS.model_copy(update={"log_dir": logs, "log_format": "json"}), log)
    return f"127.0.0.1:{grpc_port}"


@pytest.fixture(scope="module")
def gateway(app: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, metrics_port = free_port(), free_port()
    output: Path = tmp_path_factory.mktemp("smg") / "log"
    command = [
        sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", f"grpc://{app}", "--prometheus-port", str(metrics_port),
        "--model-path", str(PAIR / "target"), "--tokenizer-path", str(PAIR / "target"),
    ]  # fmt: skip
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url, process), 60)
        yield url
    except AssertionError:
        print(output.read_text(errors="replace")[-4000:])
        raise
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def is_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "smg ended"
    try:
        return httpx2.get(f"{url}/readiness", timeout=2).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture
def pace(log: RoundLog) -> Iterator[Callable[[float], None]]:
    yield log.set_pace
    log.set_pace(0.02)


@pytest.fixture
def client(gateway: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def expected_text(num: int) -> str:
    tokenizer = Tokenizer.load(PAIR / "target")
    prompt = tuple(tokenizer.apply_chat(MESSAGES))
    return tokenizer.decode([script(prompt, len(prompt) + i) for i in range(num)])


def test_a_chat_through_smg_has_our_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == expected_text(12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_a_streamed_chat_through_smg_has_the_same_tokens(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_text(12)
    assert chunks[-1].choices[0].finish_reason == "length"


def calls(logs: Path, method: str) -> list[str]:
    """How the calls of a method of smg's have ended, by the router's log."""
    written = [line for file in logs.glob("router-*.log") for line in file.read_text().splitlines()]
    lines = [json.loads(line) for line in written]
    return [line["status"] for line in lines if line.get("path") == f"mlx.grpc.engine.MlxEngine/{method}"]


def test_a_client_of_smg_that_goes_away_frees_its_row(
    client: openai.OpenAI, pace: Callable[[float], None], logs: Path
) -> None:
    """smg drops the stream and calls Abort; either would do."""
    pace(0.1)
    num_aborts = len(calls(logs, "Abort"))
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1000, stream=True)
    next(iter(stream))
    wait_until(lambda: call("Target", "stats")["rows"] == 1)
    stream.close()
    wait_until(lambda: call("Target", "stats")["rows"] == 0, 10)
    wait_until(lambda: calls(logs, "Abort")[num_aborts:] == ["OK"])
    wait_until(lambda: calls(logs, "Generate")[-1] == "CANCELLED")


def test_what_we_refuse_smg_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100_000)
    assert "context" in str(caught.value)


class Engine:
    """The contract as a gateway calls it."""

    def __init__(self, channel: grpc.Channel):
        from smg_grpc_proto.generated import common_pb2, mlx_engine_pb2, mlx_engine_pb2_grpc

        self.pb: Any = mlx_engine_pb2
        self.common: Any = common_pb2
        self.stub: Any = mlx_engine_pb2_grpc.MlxEngineStub(channel)

    def request(self, name: str, ids: list[int], *, stream: bool, **params: Any) -> Any:
        sampling = self.pb.SamplingParams(**params)
        tokenized = self.pb.TokenizedInput(input_ids=ids)
        return self.pb.GenerateRequest(
            request_id=name, tokenized=tokenized, sampling_params=sampling, stream=stream
        )


@pytest.fixture
def engine(app: str) -> Iterator[Engine]:
    with grpc.insecure_channel(app) as channel:
        yield Engine(channel)


def test_a_stream_has_chunks_of_new_ids_and_a_whole_answer_has_all_of_them(engine: Engine) -> None:
    truth = [script((9, 8, 7), 3 + i) for i in range(10)]
    *chunks, last = list(engine.stub.Generate(engine.request("a", [9, 8, 7], stream=True, max_tokens=10)))
    assert [token for chunk in chunks for token in chunk.chunk.token_ids] == truth
    assert chunks[-1].chunk.completion_tokens == 10
    assert (list(last.complete.output_ids), last.complete.finish_reason) == ([], "length")
    (whole,) = list(engine.stub.Generate(engine.request("b", [9, 8, 7], stream=False, max_tokens=10)))
    assert list(whole.complete.output_ids) == truth
    assert (whole.complete.prompt_tokens, whole.complete.completion_tokens) == (3, 10)


def test_an_aborted_call_ends_as_cancelled_and_frees_its_row(
    engine: Engine, pace: Callable[[float], None]
) -> None:
    pace(0.1)
    stream = engine.stub.Generate(engine.request("gone", [4], stream=True, max_tokens=2000))
    next(stream)
    assert engine.stub.GetServerInfo(engine.pb.GetServerInfoRequest()).active_requests == 1
    engine.stub.Abort(engine.pb.AbortRequest(request_ids=["gone", "nobody"]))
    with pytest.raises(grpc.RpcError) as ended:
        list(stream)
    assert ended.value.code() == grpc.StatusCode.CANCELLED
    wait_until(lambda: call("Target", "stats")["rows"] == 0, 5)
    assert engine.stub.GetServerInfo(engine.pb.GetServerInfoRequest()).active_requests == 0


@pytest.mark.parametrize(
    ("params", "words"),
    [({"max_tokens": 0}, "max_tokens"), ({"logprobs": 2}, "logprobs"), ({"temperature": 9.0}, "temperature")],
)
def test_what_cannot_be_played_is_an_invalid_argument(
    engine: Engine, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(engine.stub.Generate(engine.request("bad", [4], stream=True, **params)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())


def test_a_gateway_learns_of_the_model_and_gets_its_tokenizer(engine: Engine) -> None:
    import hashlib
    import io
    import zipfile

    assert engine.stub.HealthCheck(engine.pb.HealthCheckRequest()).healthy
    model = engine.stub.GetModelInfo(engine.pb.GetModelInfoRequest())
    tokenizer = Tokenizer.load(PAIR / "target")
    assert (model.served_model_name, model.max_context_length) == ("dflash-embedded", 4096)
    assert (model.vocab_size, set(model.eos_token_ids)) == (tokenizer.vocab_size, tokenizer.eos_token_ids)
    chunks = list(engine.stub.GetTokenizer(engine.common.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        assert archive.read("tokenizer.json") == (PAIR / "target" / "tokenizer.json").read_bytes()
    assert not [name for name in names if name.endswith(".safetensors")]
