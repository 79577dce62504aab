"""What of a batch's output is on disk, and of that what is finished.

A job may be killed at any instruction and submitted again. So: a result is written once, whole lines at a
time; opening a journal reads back what earlier runs left, drops a half-written end and the failed lines
(they are asked again), and tells which ``custom_id``s have their answer.
"""

import fcntl
import gzip
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Protocol, cast

from deployments.jobs import results
from deployments.jobs.files import is_gzip, local_path
from deployments.jobs.results import Result
from dflash_core.errors import InvalidRequest, Unavailable

_OPENING = b'{"id": "batch_req_'
_LOCK_PATIENCE_S = 15.0  # a job that was just stopped may still be on its way out
_PACKED_PERIOD_S = 5.0  # many small gzip members pack badly


class Journal(Protocol):
    """The output of a batch while it runs."""

    @property
    def period_s(self) -> float:
        """How long results are collected before they are written together; 0: each at once."""
        ...

    def open(self) -> frozenset[str]:
        """Read back, repair, get ready to write; return the ``custom_id``s that have their answer.

        Raises InvalidRequest if what is there is no batch's output: it stays untouched.
        """
        ...

    def append(self, new: Sequence[Result]) -> None:
        """Write results; they outlive this process when it returns. Raises OSError."""
        ...

    def finish(self) -> None:
        """Every line of the input has its result: give the output its final form."""
        ...

    def close(self) -> None:
        """Let go of the output."""
        ...


def journal_of(path: str) -> Journal:
    """The journal for a path: a local file grows line by line, a remote one cannot."""
    from deployments.jobs.parts import PartsJournal

    local = local_path(path)
    return PartsJournal(path) if local is None else LocalJournal(local)


class LocalJournal:
    """A local file that lines are appended to, held under a lock: two jobs never write to one output."""

    def __init__(self, path: Path):
        self._path = path
        self._is_packed = is_gzip(path.name)
        self._file: IO[bytes] | None = None

    @property
    def period_s(self) -> float:
        """Plain lines are written at once."""
        return _PACKED_PERIOD_S if self._is_packed else 0.0

    def open(self) -> frozenset[str]:
        """See ``Journal``; Unavailable if another job holds the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            file = undo.enter_context(_open_locked(self._path))
            kept = Kept()
            with self._reading() as stream:
                for _ in kept.answers(read_back(stream, str(self._path))):
                    pass
            if not kept.is_clean:
                stale, file = file, undo.enter_context(self._rewritten())
                stale.close()
            undo.pop_all()
        self._file = file
        return frozenset(kept.custom_ids)

    def append(self, new: Sequence[Result]) -> None:
        """See ``Journal``. Compressed, each call is a gzip member of its own."""
        assert self._file is not None
        text = b"".join(result.encode() for result in new)
        rest = memoryview(gzip.compress(text) if self._is_packed else text)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]

    def finish(self) -> None:
        """The file has its final form from the first line on."""

    def close(self) -> None:
        """Bring it to the disk and give up the lock."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _rewritten(self) -> IO[bytes]:
        """Replace the file by its answered lines, in one step: whenever we are killed, none is lost."""
        fresh = self._path.with_name(f".{self._path.name}.rewrite")
        with ExitStack() as undo:
            file = undo.enter_context(_open_locked(fresh))
            file.truncate(0)
            with self._reading() as stream, _packer(file, self._is_packed) as out:
                for answer in Kept().answers(read_back(stream, str(self._path))):
                    out.write(answer.encode())
            os.fsync(file.fileno())
            fresh.replace(self._path)
            undo.pop_all()
        return file

    def _reading(self) -> IO[bytes]:
        return cast(IO[bytes], gzip.open(self._path, "rb")) if self._is_packed else self._path.open("rb")


class Kept:
    """Of results read back, those that stay: the first answer to each ``custom_id``."""

    def __init__(self) -> None:
        self.custom_ids: set[str] = set()
        self.is_clean = True  # whether everything that was read stays

    def answers(self, found: Iterable[Result | None]) -> Iterator[Result]:
        """Pass on what stays."""
        for result in found:
            if result is None or not result.is_answered or result.custom_id in self.custom_ids:
                self.is_clean = False
            elif result.custom_id is not None:
                self.custom_ids.add(result.custom_id)
                yield result


def read_back(stream: IO[bytes], name: str) -> Iterator[Result | None]:
    """The results in an output, then None if its end is half-written.

    Raises InvalidRequest if there is anything else in it: then it is not ours to write to.
    """
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            try:
                result = results.parse(line)
            except ValueError:
                if line.endswith(b"\n") or not _may_open_a_result(line):
                    raise _foreign(name, number) from None
                yield None
                return
            yield result
            if not line.endswith(b"\n"):
                yield None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # a gzip member without its end
        if number == 0 and not isinstance(error, EOFError):
            raise _foreign(name, 1) from None
        yield None


def _may_open_a_result(line: bytes) -> bool:
    return line.startswith(_OPENING) or _OPENING.startswith(line)


def _foreign(name: str, number: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name}, line {number}: not a batch result. The file is something else: give another output"
    )


def _packer(file: IO[bytes], is_packed: bool) -> IO[bytes]:
    """A stream over ``file`` that leaves it open."""
    if is_packed:
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="wb"))
    return open(file.fileno(), "wb", closefd=False)


def _open_locked(path: Path) -> IO[bytes]:
    """Open for appending under a lock of our own. Raises Unavailable if another process keeps it."""
    until = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                raise Unavailable(f"{path}: another job is writing to it") from None
            time.sleep(0.2)
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the path still names this file: its last holder may have replaced it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
