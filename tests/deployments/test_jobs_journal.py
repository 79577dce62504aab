"""What a batch's output keeps when jobs are killed: every answer once, no half line, no foreign file."""

import fcntl
import gzip
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from deployments.jobs import journal as journals
from deployments.jobs.journal import Journal, journal_of
from deployments.jobs.requests import Request
from deployments.jobs.results import Reply, Result, of_failure, of_reply
from dflash_core.errors import InvalidRequest, Unavailable


def request(custom_id: str) -> Request:
    return Request(1, custom_id, "/v1/chat/completions", {})


def answer(custom_id: str, text: str = "Paris, à côté") -> Result:
    return of_reply(request(custom_id), Reply(200, {"text": text}, "r1"))


def failure(custom_id: str) -> Result:
    return of_failure(request(custom_id), "no_answer", "connection refused")


@pytest.fixture(params=["local", "local.gz", "remote", "remote.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind, _, packing = request.param.partition(".")
    name = "out.jsonl" + (f".{packing}" if packing else "")
    if kind == "local":
        yield str(tmp_path / "new" / name)
        return
    folder = f"memory://{uuid.uuid4().hex}"
    yield f"{folder}/{name}"
    system, inner = fsspec.url_to_fs(folder)
    if system.exists(inner):
        system.rm(inner, recursive=True)


def opened(path: str) -> tuple[Journal, frozenset[str]]:
    journal = journal_of(path)
    return journal, journal.open()


def write(path: str, *results: Result, is_finished: bool = True) -> None:
    journal, _ = opened(path)
    for result in results:
        journal.append([result])
    if is_finished:
        journal.finish()
    journal.close()


def read(path: str) -> list[dict]:
    with fsspec.open(path, "rb", compression="infer") as stream:
        return [json.loads(line) for line in stream]  # type: ignore[union-attr]


def ids(path: str) -> list[str]:
    return [line["custom_id"] for line in read(path)]


def test_an_output_is_a_line_per_result_as_openai_writes_them(path: str) -> None:
    write(path, answer("a"), failure("b"))
    first, second = read(path)
    assert first.pop("id").startswith("batch_req_")
    assert first == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"text": "Paris, à côté"}},
        "error": None,
    }
    assert (second["response"], second["error"]["code"]) == (None, "no_answer")


def test_answers_of_a_killed_job_are_found_and_kept(path: str) -> None:
    write(path, answer("a"), answer("b"), is_finished=False)
    journal, finished = opened(path)
    assert finished == {"a", "b"}
    journal.append([answer("c")])
    journal.finish()
    journal.close()
    assert ids(path) == ["a", "b", "c"]


def test_failed_lines_are_asked_again_and_leave_no_double(path: str) -> None:
    write(path, answer("a"), failure("b"), answer("c"))
    journal, finished = opened(path)
    assert finished == {"a", "c"}
    journal.append([answer("b")])
    journal.finish()
    journal.close()
    assert sorted(ids(path)) == ["a", "b", "c"]
    assert all(line["error"] is None for line in read(path))


def test_a_line_that_fails_again_is_there_once(path: str) -> None:
    write(path, failure("b"), answer("a"))
    for _ in range(3):
        write(path, failure("b"))
    assert sorted(ids(path)) == ["a", "b"]


def test_opening_a_finished_output_changes_nothing(path: str) -> None:
    write(path, answer("a"), answer("b"))
    before = read(path)
    write(path)
    assert read(path) == before


def test_half_surrogates_do_not_end_a_batch(path: str) -> None:
    write(path, answer("a\ud800", "\udfff"))
    assert ids(path) == ["a\ud800"]


def test_a_half_written_last_line_is_dropped_wherever_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(str(path), answer("a"), answer("b"))
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole) - 1):
        path.write_bytes(whole[:cut])
        journal, finished = opened(str(path))
        journal.append([answer("b", "again")])
        journal.close()
        assert (finished, ids(str(path))) == ({"a"}, ["a", "b"]), cut


def test_a_last_line_that_lacks_only_its_end_is_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(str(path), answer("a"), answer("b"))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    journal, finished = opened(str(path))
    journal.append([answer("c")])
    journal.close()
    assert (finished, ids(str(path))) == ({"a", "b"}, ["a", "b", "c"])


def test_a_half_written_gzip_member_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    write(str(path), answer("a"))
    first = path.stat().st_size
    write(str(path), answer("b"))
    whole = path.read_bytes()
    for cut in range(first + 1, len(whole), 7):
        path.write_bytes(whole[:cut])
        journal, finished = opened(str(path))
        journal.append([answer("c")])
        journal.close()
        assert {"a"} <= finished <= {"a", "b"}
        assert sorted(ids(str(path))) == sorted([*finished, "c"])


@pytest.mark.parametrize("content", [b"dear diary,\nno", b"dear diary", b'{"custom_id": "a", "body": {}}\n'])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_that_is_no_batch_output_stays_untouched(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    for stored in (content, gzip.compress(content)) if name.endswith(".gz") else (content,):
        path.write_bytes(stored)
        with pytest.raises(InvalidRequest, match="not a batch result"):
            journal_of(str(path)).open()
        assert path.read_bytes() == stored


def test_a_second_job_on_one_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_LOCK_PATIENCE_S", 0.3)
    path = tmp_path / "out.jsonl"
    write(str(path), failure("a"))
    first, _ = opened(str(path))  # replaces the file: the lock is on the new one
    with pytest.raises(Unavailable, match="another job"):
        journal_of(str(path)).open()
    first.close()
    write(str(path), answer("a"))


def test_a_kill_while_the_file_is_rewritten_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    write(str(path), answer("a"), failure("b"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            journal_of(str(path)).open()
    write(str(path), answer("b"))
    assert ids(str(path)) == ["a", "b"]
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it


def test_two_jobs_on_one_remote_output_lose_no_line_of_each_other() -> None:
    path = f"memory://{uuid.uuid4().hex}/out.jsonl"
    one, other = journal_of(path), journal_of(path)
    one.open()
    other.open()
    one.append([answer("a")])
    one.append([answer("b")])
    other.append([answer("a"), answer("c")])
    one.finish()
    other.append([answer("d")])
    assert sorted(ids(path)) == ["a", "b", "c"]
    other.finish()
    assert sorted(ids(path)) == ["a", "b", "c", "d"]
    system, inner = fsspec.url_to_fs(path)
    assert system.find(inner.rpartition("/")[0]) == [inner]


def test_a_merge_starts_anew_if_another_job_takes_its_parts_away(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"memory://{uuid.uuid4().hex}/out.jsonl"
    one, other = journal_of(path), journal_of(path)
    one.open()
    other.open()
    one.append([answer("a")])
    other.append([answer("b")])
    system, inner = fsspec.url_to_fs(path)
    with monkeypatch.context() as patch:
        exists = system.exists

        def overtaken(name: str) -> bool:
            patch.undo()
            found = exists(name)  # as it was; what is listed is gone once it is read
            other.finish()
            return found

        patch.setattr(system, "exists", overtaken)
        one.finish()
    assert sorted(ids(path)) == ["a", "b"]
    assert system.find(inner.rpartition("/")[0]) == [inner]


@pytest.mark.parametrize("call", ["rm", "rm_file"])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_kill_between_merging_and_dropping_the_parts_doubles_nothing(
    packing: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"memory://{uuid.uuid4().hex}/out.jsonl{packing}"
    system, _ = fsspec.url_to_fs(path)
    with monkeypatch.context() as patch:
        patch.setattr(type(system), call, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(path, answer("a"), failure("b"))
    write(path, answer("b"))
    assert sorted(ids(path)) == ["a", "b"]
    folder = path.rpartition("/")[0]
    assert [p.rpartition("/")[2] for p in system.find(folder)] == [f"out.jsonl{packing}"]
