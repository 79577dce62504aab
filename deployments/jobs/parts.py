"""The output of a batch where files cannot grow, as in object stores: parts beside it, merged at the end.

Until then the answers lie in ``OUTPUT.parts/``. There is no lock there: two jobs that write to one remote
output at a time do the work twice. A part's name ends in its run, and a merge drops only what it has read, so
neither takes the other's lines and the result still has each once. What a store without locks cannot tell
is two merges that end in the same instant: the later one is then the output, the earlier one's last lines go.
"""

import gzip
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, cast

from deployments.jobs.files import file_system, is_gzip
from deployments.jobs.journal import Kept, read_back
from deployments.jobs.results import Result
from dflash_core.errors import InvalidRequest

_PERIOD_S = 30.0


class PartsJournal:
    """A remote output. See ``journal.Journal``."""

    def __init__(self, path: str):
        self._path = path
        self._system, self._inner = file_system(path)
        self._folder = f"{self._inner}.parts"
        self._suffix = ".jsonl.gz" if is_gzip(path) else ".jsonl"
        self._run = uuid.uuid4().hex[:12]
        self._number = 0
        self._has_news = False

    @property
    def period_s(self) -> float:
        """One object for the results of this long: what a kill may cost, to be asked again."""
        return _PERIOD_S

    def open(self) -> frozenset[str]:
        """See ``Journal``. Writes an empty part, so that an output that cannot be written is told now."""
        kept = Kept()
        parts = self._parts()
        for _ in kept.answers(self._read_all(parts)):
            pass
        self._number = max((_number_of(part) for part in parts), default=0)
        self._has_news = bool(parts) or not kept.is_clean
        try:
            self._put([])
        except NotImplementedError:
            raise InvalidRequest(f"{self._path}: this kind of place cannot be written to") from None
        return frozenset(kept.custom_ids)

    def append(self, new: Sequence[Result]) -> None:
        """See ``Journal``."""
        self._put(new)
        self._has_news = True

    def finish(self) -> None:
        """Merge, then drop the parts: killed between the two, the next run does it again."""
        parts = self._parts()
        if self._has_news or not self._system.exists(self._inner):
            while not self._merge(parts):  # another run did in the meantime: the output holds them now
                parts = self._parts()
        # A run whose parts are merged has no use for a merge of its own: killed amid one, it left it there.
        for name in [*parts, *{self._fresh(_run_of(part)) for part in parts}]:
            with suppress(FileNotFoundError):
                self._system.rm_file(name)

    def _merge(self, parts: Sequence[str]) -> bool:
        """Make the output of itself and these parts; False, with nothing done, if one of them is gone."""
        fresh = self._fresh(self._run)  # the output is also read
        packing = "gzip" if is_gzip(self._path) else None
        try:
            with self._system.open(fresh, "wb", compression=packing) as stream:
                for result in _one_each(self._read_all(parts)):
                    stream.write(result.encode())
            if not set(parts) <= set(self._parts()):
                return False
            self._system.mv(fresh, self._inner)
        except FileNotFoundError:
            return False
        return True

    def _fresh(self, run: str) -> str:
        return f"{self._inner}.merging-{run}"

    def close(self) -> None:
        """Nothing is held between two parts."""

    def _put(self, new: Sequence[Result]) -> None:
        self._number += 1
        text = b"".join(result.encode() for result in new)
        name = f"{self._folder}/{self._number:06d}-{self._run}{self._suffix}"
        self._system.makedirs(self._folder, exist_ok=True)
        self._system.pipe_file(name, gzip.compress(text) if is_gzip(self._path) else text)

    def _parts(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            return sorted(self._system.find(self._folder))
        except FileNotFoundError:
            return []

    def _read_all(self, parts: Sequence[str]) -> Iterator[Result | None]:
        """The output as it is, then these parts."""
        for part in [self._inner, *parts] if self._system.exists(self._inner) else parts:
            with self._system.open(part, "rb", compression="infer") as stream:
                yield from read_back(cast(IO[bytes], stream), part)


def _run_of(part: str) -> str:
    return part.rpartition("/")[2].partition(".")[0].partition("-")[2]


def _number_of(part: str) -> int:
    number = part.rpartition("/")[2].partition(".")[0].partition("-")[0]
    return int(number) if number.isdigit() else 0


def _one_each(found: Iterator[Result | None]) -> Iterator[Result]:
    """The first answer to each ``custom_id``; after them, the last failure of each line without one."""
    kept = Kept()
    failures: dict[object, Result] = {}

    def answers_only() -> Iterator[Result | None]:
        for result in found:
            if result is not None and not result.is_answered:
                error = result.document["error"] or {}
                failures[result.custom_id or error.get("line")] = result
            yield result

    yield from kept.answers(answers_only())
    for result in failures.values():
        if result.custom_id not in kept.custom_ids:
            yield result
