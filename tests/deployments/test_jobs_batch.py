"""A batch against a real HTTP server: every line once, errors stay with their line, stops cost nothing."""

import asyncio
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments import cli
from deployments.generation import Event, Generation
from deployments.jobs import batch, progress, where
from deployments.jobs.client import retry_after_s
from deployments.jobs.progress import Progress, Tally
from deployments.jobs.requests import BadLine, Request, parse_line
from deployments.jobs.results import Reply, of_document, of_reply
from deployments.keys import keys_of
from deployments.settings import Settings
from dflash_core.errors import QueueFull, RowFailed, Unavailable
from tests.deployments.conftest import ROOT, free_port
from tests.deployments.http_stub import StubBackend, chat, failing, serving, two_rounds


@pytest.fixture
def backend() -> StubBackend:
    return StubBackend()


@pytest.fixture
def url(backend: StubBackend) -> Iterator[str]:
    with serving(backend) as url:
        yield url


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.jobs.client._LONGEST_PAUSE_S", 0.02)


def line(custom_id: str, **fields: Any) -> str:
    body = chat(**fields)
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The command as a job runs it, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["batch", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.run(lambda: batch.typer.run(batch.main))
    return int(stop.value.code or 0), capsys.readouterr().err


@pytest.fixture
def answered(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a batch of these lines; gives exit code, what was said, and the results by ``custom_id``."""

    def play(*lines: str, **flags: object) -> tuple[int, str, dict[str | None, dict[str, Any]]]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
        extra = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
        code, said = run(capsys, "--input", source, "--output", output, "--url", url, *extra)
        results = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
        assert len({r["custom_id"] for r in results}) == len(results)
        return code, said, {r["custom_id"]: r for r in results}

    return play


def test_every_line_is_answered_with_the_servers_own_body(answered: Any, backend: StubBackend) -> None:
    code, said, results = answered(*[line(f"q{i}", seed=i) for i in range(20)], in_flight=7)
    assert (code, set(results)) == (0, {f"q{i}" for i in range(20)})
    assert "all 20 rows are answered" in said
    response = results["q3"]["response"]
    assert response["body"]["choices"][0]["message"]["content"] == "Hello, world"
    assert (response["status_code"], bool(response["request_id"])) == (200, True)
    assert sorted(g.sampling.seed for g in backend.generations) == list(range(20))


def test_every_kind_of_request_that_the_server_answers_may_be_in_a_file(answered: Any) -> None:
    bodies = {
        "/v1/chat/completions": chat(),
        "/v1/completions": {"model": "stub-model", "prompt": "Hi"},
        "/v1/responses": {"model": "stub-model", "input": "Hi"},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    code, said, results = answered(*map(json.dumps, lines), progress_every=100)
    assert (code, set(results)) == (0, set(bodies)), said
    output = results["/v1/responses"]["response"]["body"]["output"]
    assert output[0]["content"][0]["text"] == "Hello, world"
    tallied = Tally(3, 0)
    for result in results.values():
        tallied.add(of_document(result))
    assert (tallied.tokens, tallied.rounds, tallied.accepted) == (15, 6, 9)


def test_no_more_than_the_given_number_is_in_flight(answered: Any, backend: StubBackend) -> None:
    now, most = 0, 0

    async def counted(generation: Generation) -> AsyncGenerator[Event, None]:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.02)
        now -= 1
        async for event in two_rounds(generation):
            yield event

    backend.script = counted
    assert answered(*[line(f"q{i}") for i in range(12)], in_flight=3)[0] == 0
    assert most == 3


def test_errors_stay_with_their_line_and_the_summary_counts_them(answered: Any) -> None:
    code, said, results = answered(
        line("good"),
        "{not json",
        line("too-much", max_tokens=10_000),
        line("streams", stream=True),
        json.dumps({"custom_id": "elsewhere", "url": "/metrics", "body": {}}),
        line("also-good"),
    )
    assert code == 1
    assert "4 of 6 rows failed" in said
    assert "1 context_length_exceeded" in said
    assert (
        results["good"]["response"]["status_code"] == results["also-good"]["response"]["status_code"] == 200
    )
    refused = results["too-much"]
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert results[None]["error"]["line"] == 2
    assert results["streams"]["error"]["code"] == "invalid_body"
    assert results["elsewhere"]["error"]["code"] == "invalid_url"


def test_run_again_it_asks_what_failed_and_nothing_else(answered: Any, backend: StubBackend) -> None:
    lines = [line(f"q{i}", max_tokens=10_000 if i == 1 else 5) for i in range(3)]
    assert answered(*lines)[0] == 1
    lines[1] = line("q1", max_tokens=5)
    backend.generations.clear()
    code, said, results = answered(*lines)
    assert (code, len(backend.generations), set(results)) == (0, 1, {"q0", "q1", "q2"})
    assert "2 of 3 rows have their answer" in said


def test_a_429_is_waited_out_as_long_as_the_server_asks(answered: Any, backend: StubBackend) -> None:
    refusals: list[float] = []

    async def full_twice(generation: Generation) -> AsyncGenerator[Event, None]:
        if len(refusals) < 2:
            refusals.append(time.monotonic())
            raise QueueFull("full", retry_after=1.0)
        async for event in two_rounds(generation):
            yield event

    backend.script = full_twice
    code, _, results = answered(line("a"), line("b"), in_flight=1, patience=0)
    assert (code, set(results)) == (0, {"a", "b"})
    assert refusals[1] - refusals[0] >= 1.0
    assert len(backend.generations) == 4


def test_a_503_is_tried_again_within_the_patience_and_then_is_the_result(
    answered: Any, backend: StubBackend
) -> None:
    backend.script = failing(Unavailable("loading"))
    code, said, results = answered(line("a"), patience=0)
    assert (code, results["a"]["response"]["status_code"]) == (1, 503)
    assert "1 unavailable" in said

    async def recovering(generation: Generation) -> AsyncGenerator[Event, None]:
        backend.script = two_rounds
        raise RowFailed("the window broke down")
        yield  # a generator

    backend.script = recovering
    assert answered(line("a"))[0] == 0


@contextmanager
def scripted(answers: list[tuple[int, bytes]]) -> Iterator[str]:
    """The address of a server that gives these answers, one after the other."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = answers.pop(0)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


@pytest.mark.parametrize("statuses", [(429, 429, 500, 200), (503, 429, 503, 200)])
def test_trouble_after_a_429_has_tries_and_patience_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statuses: tuple[int, ...]
) -> None:
    answers = [(status, b"{}") for status in statuses]
    (tmp_path / "in.jsonl").write_text(line("a"))
    paths = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    with scripted(answers) as url:  # a 429 holds back for a second, longer than the patience
        code, said = run(capsys, *paths, "--url", url, "--patience", 0.6)
    assert (code, answers) == (0, []), said


def test_the_proxys_own_404_is_waited_out_and_the_servers_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While an application is replaced, Ray's proxy knows no route."""
    answers = [(404, b"Path '/v1/chat/completions' not found."), (404, b"Path ..."), (200, b"{}")]
    (tmp_path / "in.jsonl").write_text(line("a"))
    output = tmp_path / "out.jsonl"
    with scripted(answers) as url:
        paths = ("--input", tmp_path / "in.jsonl", "--output", output)
        assert run(capsys, *paths, "--url", url)[0] == 0
        assert answers == []
        output.unlink()
        answers.append((404, b'{"error": {"code": "model_not_found", "message": "no such model"}}'))
        code, said = run(capsys, *paths, "--url", url)
        assert (code, answers, "1 model_not_found" in said) == (1, [], True)
        output.unlink()
        answers.append((200, b"<html>Welcome to nginx!</html>"))
        code, said = run(capsys, *paths, "--url", url)
        assert (code, "1 not_json" in said) == (1, True)


def test_without_a_server_each_line_fails_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a") + "\n" + line("b") + "\n")
    nowhere = f"http://127.0.0.1:{free_port()}"
    output = tmp_path / "out.jsonl"
    code, said = run(
        capsys, "--input", tmp_path / "in.jsonl", "--output", output, "--url", nowhere, "--patience", 0.1
    )
    assert code == 1
    assert "2 no_answer" in said
    errors = [json.loads(text)["error"] for text in output.read_text().splitlines()]
    assert [error["code"] for error in errors] == ["no_answer", "no_answer"]


def test_a_server_that_is_gone_is_waited_for_once_and_not_by_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(line(f"q{i}") for i in range(30)))
    paths = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    nowhere = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    code, said = run(capsys, *paths, "--url", nowhere, "--patience", 0.5, "--in-flight", 1)
    assert (code, "30 no_answer" in said) == (1, True)
    assert 0.4 < time.monotonic() - began < 6


def test_lines_with_one_custom_id_are_refused_before_anything_is_sent(
    tmp_path: Path, url: str, backend: StubBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("a"), line("b"), line("a")]))
    code, said = run(capsys, "--input", source, "--output", output, "--url", url)
    assert (code, backend.generations, output.exists()) == (1, [], False)
    assert "lines 1 and 3 have the same custom_id 'a'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("damage", ["cut", "wrong", "plain"])
def test_a_compressed_input_that_is_broken_is_refused_before_anything_is_sent(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], damage: str, backend: StubBackend
) -> None:
    lines = "\n".join(line(f"q{i}") for i in range(5)).encode()
    whole = gzip.compress(lines)
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes({"cut": whole[:-12], "wrong": whole[:10] + b"\xff" * 40, "plain": lines}[damage])
    code, said = run(capsys, "--input", source, "--output", tmp_path / "out.jsonl", "--url", url)
    assert code != 0
    assert "is cut short, or not compressed as its name says" in said
    assert "Traceback" not in said
    assert backend.generations == []


def test_gzip_goes_in_and_comes_out(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(line(f"q{i}") for i in range(5)).encode()))
    assert run(capsys, "--input", source, "--output", output, "--url", url)[0] == 0
    results = gzip.decompress(output.read_bytes()).splitlines()
    assert {json.loads(text)["custom_id"] for text in results} == {f"q{i}" for i in range(5)}


def test_remote_paths_work_and_a_run_goes_on_from_their_parts(
    url: str, backend: StubBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    from deployments.jobs.journal import journal_of
    from deployments.jobs.requests import Request

    folder = f"memory://batch-{os.getpid()}"
    with fsspec.open(f"{folder}/in.jsonl", "wb") as stream:
        stream.write("\n".join(line(f"q{i}") for i in range(5)).encode())  # type: ignore[union-attr]
    with closing(journal_of(f"{folder}/out.jsonl")) as earlier:
        earlier.open()
        earlier.append([of_reply(Request(1, "q2", "", {}), Reply(200, {"from": "earlier"}))])
    code, _ = run(capsys, "--input", f"{folder}/in.jsonl", "--output", f"{folder}/out.jsonl", "--url", url)
    with fsspec.open(f"{folder}/out.jsonl", "rb") as stream:
        results = {r["custom_id"]: r for r in map(json.loads, stream)}  # type: ignore[arg-type]
    assert (code, len(results), len(backend.generations)) == (0, 5, 4)
    assert results["q2"]["response"]["body"] == {"from": "earlier"}


def test_a_protocol_that_is_not_there_is_one_line(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "--input", "nosuch://x/in.jsonl", "--output", tmp_path / "o", "--url", url)
    assert (code, said.count("\n")) == (1, 1)
    assert "nosuch" in said


def test_an_output_inside_a_jobs_own_folder_is_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    code, said = run(capsys, "--input", "in.jsonl", "--output", folder / "out.jsonl", "--url", url)
    assert code == 1
    assert "absolute path that outlives the job" in said


@pytest.mark.parametrize("source", ["file", "environment"])
def test_keys_come_from_a_file_or_the_environment(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    (tmp_path / "key").write_text("# the batch's\nsecret\n")
    with serving(StubBackend(), api_keys=("secret",)) as url:
        paths = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--url", url]
        code, said = run(capsys, *paths)
        assert (code, "1 invalid_api_key" in said) == (1, True)
        if source == "environment":
            monkeypatch.setenv("DFLASH_API_KEY", "secret")
        else:
            paths += ["--api-key-file", tmp_path / "key"]
        assert run(capsys, *paths)[0] == 0


@pytest.mark.parametrize("given", [None, "second"])
def test_standalone_a_batch_calls_its_own_application_with_a_key_of_its_settings(
    given: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def application(settings: Settings, output: str) -> Iterator[where.Application]:
        keys = keys_of(settings) if given is None else (given,)
        with serving(StubBackend(), api_keys=keys) as url:
            yield where.Application(url, threading.Event())

    monkeypatch.setattr(where, "of_our_own", application)
    (tmp_path / "keys").write_text("# the server's\nfirst\nsecond\n")
    (tmp_path / "settings.yaml").write_text(f"api_keys_file: {tmp_path / 'keys'}\n")
    if given is not None:
        monkeypatch.setenv("DFLASH_API_KEY", given)
    (tmp_path / "in.jsonl").write_text(line("a"))
    paths = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    code, said = run(capsys, *paths, "--standalone", "--config", tmp_path / "settings.yaml")
    assert code == 0, said


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_half_way_and_run_again_it_has_every_line_once(
    tmp_path: Path, url: str, backend: StubBackend, signal_number: int
) -> None:
    played: list[str] = []

    async def slow(generation: Generation) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.05)
        async for event in two_rounds(generation):
            yield event
        played.append(generation.id)

    backend.script = slow
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"q{i}") for i in range(60)))
    command = [
        sys.executable,
        "-m",
        "deployments.jobs.batch",
        "--input",
        str(source),
        "--output",
        str(output),
    ]
    command += ["--url", url, "--in-flight", "4"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as job:
        until = time.monotonic() + 60
        while len(played) < 20:
            assert time.monotonic() < until
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal_number)
        _, said = job.communicate(timeout=30)
    if signal_number == signal.SIGTERM:
        assert job.returncode == 130
        assert "run it again to go on" in said
    num_before = output.read_bytes().count(b"\n")
    assert 10 < num_before < 60
    assert backend.closed.wait(5)  # what was in flight is over
    played.clear()
    again = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    results = [json.loads(text)["custom_id"] for text in output.read_text().splitlines()]
    assert (again.returncode, sorted(results)) == (0, sorted(f"q{i}" for i in range(60)))
    assert len(played) == 60 - num_before


def test_an_output_that_can_no_longer_be_written_ends_the_job_with_one_line(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deployments.jobs.journal.LocalJournal.append", full)
    (tmp_path / "in.jsonl").write_text("\n".join(line(f"q{i}") for i in range(50)))
    code, said = run(capsys, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "o.jsonl", "--url", url)
    assert code == 1
    assert said.splitlines()[-1].endswith("No space left on device")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def result(rounds: int, accepted: int, tokens: int) -> Any:
    body = {
        "usage": {"completion_tokens": tokens},
        "dflash": {"rounds": rounds, "accepted": accepted},
    }
    return of_reply(Request(1, "x", "", {}), Reply(200, body))


def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """10 of 40 lines done before; 10 more in 20 s, each with 8 tokens in 2 rounds that accepted 6."""
    seen = Tally(num_lines=40, num_skipped=10, began=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 20.0)
    for _ in range(10):
        seen.add(result(2, 6, 8))
    return seen


def test_a_job_log_gets_plain_lines_at_a_slow_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, out = tally(monkeypatch), io.StringIO()
    shown = Progress(seen, out, period_s=10.0)
    for _ in range(50):
        shown.show()
    assert out.getvalue() == ""
    monkeypatch.setattr(progress.time, "monotonic", lambda: 31.0)
    shown.show()
    shown.show()
    seen.add(of_reply(Request(1, "y", "", {}), Reply(503, {})))
    shown.close()
    first, last = out.getvalue().splitlines()
    assert first == "batch: 20/40 rows · 2.6 tok/s · 3.00 accepted a round · 01:02 left"
    assert last.startswith("batch: 21/40 rows · 1 failed · ")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, out = tally(monkeypatch), Terminal()
    shown = Progress(seen, out)
    shown.show()
    shown.close()
    last = re.split(r"[\r\n]+", out.getvalue().strip())[-1]
    assert re.search(r"batch  50% \|.+\| 20/40 rows, 4\.0 tok/s · 3\.00 accepted a round · 00:40 left", last)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[]", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'"\xff"', "invalid_json_line"),
        (b'{"body": {}}', "missing_custom_id"),
        (b'{"custom_id": 7, "body": {}}', "missing_custom_id"),
        (b'{"custom_id": "a", "method": "GET", "body": {}}', "invalid_method"),
        (b'{"custom_id": "a", "body": []}', "invalid_body"),
    ],
)
def test_a_line_that_cannot_be_sent_has_a_code(text: bytes, code: str) -> None:
    parsed = parse_line(text, 1)
    assert isinstance(parsed, BadLine)
    assert parsed.code == code


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s({"retry-after": "2.5"}) == 2.5
    assert retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0.0
    assert retry_after_s({"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}) == 600.0
    assert retry_after_s({"retry-after": "soon"}) == retry_after_s({}) == 0.0


def test_signals_mean_again_what_they_meant_before(answered: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    answered(line("a"))
    num_threads = threading.active_count()
    answered(line("b"))
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.active_count() <= num_threads
