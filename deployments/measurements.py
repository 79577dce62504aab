"""A gate or a benchmark, from names of checkpoints and the text of a file of chats to a report.

What the command line, and jobs on a worker, both do. Plain data goes in and comes out, so that it can travel.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deployments.settings import EMBEDDED
from dflash_core import blas
from dflash_core.request import Sampling

if TYPE_CHECKING:
    from deployments.bench import ArmResult
    from deployments.parity import Check
    from dflash_core.loading import LoadedLane
    from dflash_core.request import RowRequest

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Chats:
    """A file of chats: its text, and its name for messages."""

    text: str
    name: str
    limit: int


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints: ``embedded``, a directory or a hub id each."""

    target: str = EMBEDDED
    drafter: str = EMBEDDED
    dtype: str | None = None  # None: the device's

    def load(self) -> "LoadedLane":
        """Load target and drafter. Raises CheckpointError."""
        blas.prepare()
        import mlx.core as mx

        from dflash_core.checkpoints import resolve_drafter, resolve_target
        from dflash_core.loading import load_lane

        chosen = None if self.dtype is None else getattr(mx, self.dtype)
        return load_lane(resolve_target(self.target), resolve_drafter(self.drafter), dtype=chosen)

    def rows(self, chats: Chats, sampling: Sampling | None = None) -> "list[RowRequest]":
        """The chats, tokenised for the target. Raises InvalidRequest."""
        from deployments.prompts import parse_prompts
        from dflash_core.checkpoints import resolve_target
        from dflash_core.text import Tokenizer

        tokenizer = Tokenizer.load(resolve_target(self.target))
        return parse_prompts(chats.text, chats.name, tokenizer, limit=chats.limit, sampling=sampling)


@dataclass(frozen=True, slots=True)
class ParityRun:
    """The exactness gate."""

    models: Models
    rows: int
    width: int | None  # None: the drafter's block
    margin: float
    temperature: float

    def play(self, chats: Chats) -> "list[Check]":
        """Run the gate and its controls."""
        lane = self.models.load()
        from deployments import parity

        sampling = Sampling(temperature=self.temperature) if self.temperature > 0 else None
        width = self.width or lane.drafter.block_size
        options = parity.ParityOptions(rows=self.rows, width=width, margin=self.margin)
        return parity.run(lane, self.models.rows(chats, sampling), options)

    def report(self, chats: Chats, log: Log) -> dict[str, Any]:
        """Run it, and tell as JSON; ``passed`` is the verdict."""
        checks = self.play(chats)
        from deployments import bench, parity

        passed = parity.show(checks, log)
        run = {**asdict(self), "prompts": chats.name, "limit": chats.limit}
        return {
            "passed": passed,
            "checks": [asdict(c) for c in checks],
            "run": run,
            "machine": bench.machine(),
        }


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The same chats under every policy."""

    models: Models
    rows: int
    arms: tuple[str, ...]
    repeat: int
    width: int | None  # None: auto

    def play(self, chats: Chats, log: Log) -> "tuple[list[ArmResult], dict[str, Any]]":
        """Play it; return the arms' results, and all as JSON."""
        lane = self.models.load()
        from deployments import bench

        requests = self.models.rows(chats)
        options = bench.BenchOptions(self.rows, self.arms, self.repeat, self.width)
        results = bench.run(lane, requests, options, log)
        return results, bench.report(results, options, len(requests))

    def report(self, chats: Chats, log: Log) -> dict[str, Any]:
        """Play it, and tell as JSON."""
        from deployments import bench

        results, report = self.play(chats, log)
        log(bench.HEADER)
        for result in results:
            log(result.line(results[0]))
        return report
