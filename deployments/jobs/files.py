"""Paths of jobs, local or remote (``s3://``, ``gs://``, ``hf://``, ...: what fsspec has a package for)."""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dflash_core.errors import InvalidRequest

# Where Ray unpacks a job's working directory. Ray deletes it when it needs the room.
_JOB_FOLDER = "runtime_resources/working_dir_files"


def file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path inside it.

    Raises InvalidRequest for a protocol that does not exist or whose package is not installed.
    """
    try:
        return fsspec.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InvalidRequest(f"{path}: {error}") from None


def local_path(path: str) -> Path | None:
    """The path on this machine, absolute; None if it is remote."""
    system, inner = file_system(path)
    return Path(inner) if isinstance(system, LocalFileSystem) else None


def is_gzip(path: str) -> bool:
    """Whether a file of this name is written compressed."""
    return path.endswith(".gz")


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """Open for reading, decompressed by the name's ending (``.gz``, ``.bz2``, ``.xz``).

    Raises OSError, InvalidRequest for what is not packed as its name says, or is no file: pipes and devices
    have no end that can be relied on, and are not read twice.
    """
    local = local_path(path)
    if local is not None and local.exists() and not local.is_file() and not local.is_dir():
        raise InvalidRequest(f"{path}: no plain file")
    with ExitStack() as opened:
        try:
            stream = opened.enter_context(fsspec.open(path, "rb", compression="infer"))
        except (ValueError, zipfile.BadZipFile) as error:
            raise InvalidRequest(f"{path}: is not packed as its name says: {error}") from None
        yield cast(IO[bytes], stream)


def write_text(path: str, text: str) -> None:
    """Write a small file, with the folders above it."""
    system, inner = file_system(path)
    with contextlib.suppress(NotImplementedError):
        system.makedirs(system._parent(inner), exist_ok=True)
    with fsspec.open(path, "wb", compression="infer") as stream:
        cast(IO[bytes], stream).write(text.encode())


def check_outlives_job(path: str) -> None:
    """Refuse an output in the copy of the working directory that Ray makes for a job: it would be lost.

    Raises InvalidRequest.
    """
    local = local_path(path)
    if local is not None and _JOB_FOLDER in os.path.realpath(local).replace(os.sep, "/"):
        raise InvalidRequest(
            f"{path}: this lies in the job's own copy of the working directory, which Ray deletes. "
            "Give an absolute path that outlives the job, or a remote one"
        )
