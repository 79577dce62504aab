"""Shows the lines of replicas where ``up`` was typed: their processes are Ray's, and so is their output."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PERIOD_S = 0.2


@contextmanager
def shown(output: TextIO) -> Iterator[Path]:
    """Give a folder for logs whose lines go to ``output`` as they come; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-logs-"))
    is_over = threading.Event()
    follower = Follower(folder, output)

    def follow() -> None:
        while not is_over.wait(PERIOD_S):
            follower.show()

    thread = threading.Thread(target=follow, name="logs", daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        is_over.set()
        thread.join()
        follower.show()
        follower.close()
        shutil.rmtree(folder, ignore_errors=True)


class Follower:
    """Reads what is new in the ``.log`` files of a folder; a file that was rolled over is read to its end."""

    def __init__(self, folder: Path, output: TextIO):
        self._folder = folder
        self._output = output
        self._open: dict[Path, TextIO] = {}
        self._rest: dict[Path, str] = {}  # the start of a line that is still being written

    def show(self) -> None:
        """Write the lines that have come."""
        for path in sorted(self._folder.glob("*.log")):
            file = self._open.get(path)
            if file is not None:
                self._copy(path, file)
                if _is(path, file):
                    continue
                file.close()
            self._open[path] = path.open(encoding="utf-8", errors="replace")
            self._copy(path, self._open[path])
        self._output.flush()

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            file.close()

    def _copy(self, path: Path, file: TextIO) -> None:
        text = self._rest.pop(path, "") + file.read()
        whole, newline, rest = text.rpartition("\n")
        self._output.write(whole + newline)
        if rest:
            self._rest[path] = rest


def _is(path: Path, file: TextIO) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return True
