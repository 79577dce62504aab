"""Batch files that are none: an error on its line, or one clear message."""

import gzip
import io
import json
import os
from pathlib import Path

import pytest

from deployments.jobs import results
from deployments.jobs.batch import without_secrets
from deployments.jobs.lines import LineTooLong, bounded_lines
from deployments.jobs.requests import BadLine, Request, parse_line, read_lines, survey
from deployments.prompts import read_prompts
from dflash_core.errors import InvalidRequest
from tests.deployments.http_stub import tokenizer

GOOD = b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hi"}]}}'


def test_a_line_that_is_too_long_is_passed_over_and_not_held() -> None:
    class Endless(io.RawIOBase):
        """Sixty-four mebibytes without an end of line, then a good one."""

        left = 64 * 2**20
        most = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            self.most = max(self.most, len(buffer))
            if self.left > 0:
                size = min(len(buffer), self.left)
                buffer[:size] = b"x" * size
                self.left -= size
                return size
            size = min(len(buffer), len(self.tail))
            buffer[:size], self.tail = self.tail[:size], self.tail[size:]
            return size

        tail = b"\n" + GOOD

    source = Endless()
    first, second = bounded_lines(io.BufferedReader(source), most=2**20)
    assert isinstance(first, LineTooLong)
    assert second == GOOD
    assert source.most <= 2**21


def test_a_line_too_long_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "input.jsonl.gz"
    file.write_bytes(gzip.compress(b"x" * (33 * 2**20) + b"\r\n" + GOOD + b"\r\n"))
    bad, good = read_lines(str(file))
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.code) == (1, "line_too_long")
    assert isinstance(good, Request)
    assert good.number == 2
    assert survey(str(file)).num_lines == 2


@pytest.mark.parametrize("depth", [101, 500, 900, 5000])
def test_a_line_nested_too_deeply_is_an_error_of_its_own(depth: int) -> None:
    text = b'{"custom_id": "a", "body": {"x": ' + b"[" * depth + b"]" * depth + b"}}"
    line = parse_line(text, 3)
    assert isinstance(line, BadLine)
    assert line.code == "invalid_json_line"
    shallow = b'{"custom_id": "a", "body": {"x": ' + b"[" * 90 + b"]" * 90 + b"}}"
    assert isinstance(parse_line(shallow, 3), Request)


def test_a_pipe_or_a_device_is_no_input(tmp_path: Path) -> None:
    pipe = tmp_path / "input.jsonl"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero"):
        with pytest.raises(InvalidRequest, match="no plain file"):
            survey(path)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zip"])
def test_a_file_that_is_not_packed_as_its_name_says_is_one_message(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"input.jsonl{ending}"
    file.write_bytes(GOOD)
    with pytest.raises((InvalidRequest, OSError)) as caught:
        survey(str(file))
    assert str(caught.value)


def test_a_long_custom_id_is_not_repeated_whole(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "x" * 100_000, "body": {}})
    file = tmp_path / "input.jsonl"
    file.write_text(f"{line}\n{line}\n")
    with pytest.raises(InvalidRequest, match="lines 1 and 2 have the same custom_id") as caught:
        survey(str(file))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("error", ['"boom"', "[1]", '{"line": [1]}', "7"])
def test_an_output_whose_errors_are_none_of_ours_is_no_batch_output(error: str) -> None:
    line = f'{{"id": "batch_req_1", "custom_id": null, "response": null, "error": {error}}}'
    with pytest.raises(ValueError, match="none of ours"):
        results.parse(line.encode())


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "Hi"}], "seed": "abc"}',
        '{"messages": [{"role": "user", "content": "Hi"}], "seed": [1]}',
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1e999}',
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -5}',
        '{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "wizard", "content": "Hi"}]}',
        '{"messages": ' + "[" * 5000 + "]" * 5000 + "}",
        '"text"',
        "{",
    ],
)
def test_prompts_that_are_none_name_their_line(tmp_path: Path, body: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '\ufeff{"body": {"messages": [{"role": "user", "content": "Hi"}]}}\r\n{"body": ' + body + "}\n"
    )
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl, line 2: "):
        read_prompts(file, tokenizer())


@pytest.mark.parametrize("line", ["[]", "{}", '{"body": 3}', '{"messages": []}'])
def test_prompts_that_are_no_batch_lines_are_told_what_is_missing(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InvalidRequest, match=r"line 1: .* no object 'body'"):
        read_prompts(file, tokenizer())


def test_a_password_in_an_address_does_not_reach_the_log() -> None:
    for shown in ("http://h:80/v1", "http://h:80", "http://[::1]:80/a@b"):
        secret = shown.replace("://", "://user:sk-secret@")
        assert without_secrets(secret) == shown
        assert without_secrets(shown) == shown


def test_prompts_that_are_no_text_are_one_message(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_prompts(file, tokenizer())
