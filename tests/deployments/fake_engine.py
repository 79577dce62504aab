"""A scripted engine for tests of the deployments: real messages, no models.

A row's token at position p is a fixed function of its prompt and p, so a row that moves must go on
exactly where it was. Features carry their own position and row, so the fake drafter can tell whether its
context is whole; it drafts the right tokens if so, and raises if not.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

import dflash_core.pair
from deployments.engine import RouterParts, TargetParts
from deployments.exchange.patience import Patience
from deployments.exchange.remote import DrafterLink, RemoteDrafter
from deployments.exchange.sessions import Sessions
from deployments.exchange.transport import Transport
from deployments.generation import ModelCard
from deployments.lane import Lane
from deployments.settings import Settings
from dflash_core.events import RoundReport, RowProgress
from dflash_core.protocols import Drafter, Drafts, FeatureBlock
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text.tokenizer import Tokenizer

BLOCK = 4
FAULT = 8100  # a prompt with this token fails in its third round; no row of these tests has one by chance
DIM = 64
PAIR = Path(dflash_core.pair.__file__).parent


def script(prompt: tuple[int, ...], position: int) -> int:
    """The token at an absolute position: an ordinary one, never a control token."""
    digest = hashlib.blake2b(repr((prompt, position)).encode(), digest_size=4).digest()
    return 300 + int.from_bytes(digest, "little") % 2000


def row_key(prompt: tuple[int, ...]) -> float:
    return float(sum(prompt) % 1000)


@dataclass
class FakeRow:
    request: RowRequest
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # features given to the drafter

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.tokens[: self.request.prompt_length]

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.tokens)


@dataclass(frozen=True)
class RoundLog:
    """Rounds of a target replica, in a folder that the test reads; the test sets their pace there."""

    folder: Path

    def add(self, began: float, budgets: list[int]) -> None:
        """Rows are told apart by the budgets that they came with."""
        with (self.folder / "rounds").open("a") as file:
            file.write(json.dumps([began, budgets]) + "\n")

    def rounds(self) -> list[tuple[float, list[int]]]:
        """When each round began, and who was in it."""
        file = self.folder / "rounds"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    def set_pace(self, round_s: float) -> None:
        """Let rounds take so long from the next one on."""
        fresh = self.folder / "pace.new"
        fresh.write_text(str(round_s))
        fresh.replace(self.folder / "pace")

    @contextmanager
    def held(self) -> Iterator[None]:
        """No target starts while the block lasts."""
        file = self.folder / "held"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def await_release(self) -> None:
        """Wait for the end of such a block."""
        while (self.folder / "held").exists():
            time.sleep(0.05)

    def round_s(self, default: float) -> float:
        file = self.folder / "pace"
        return float(file.read_text()) if file.exists() else default


class FakeWindow:
    """Plays rows by script; drafts, if a drafter is there, widen a round to BLOCK tokens."""

    def __init__(
        self,
        window_id: WindowId,
        drafter: Drafter | None,
        max_rows: int,
        round_s: float,
        log: "RoundLog | None" = None,
    ):
        self._id = window_id
        self._log = log
        self._drafter = drafter
        self._max_rows = max_rows
        self._round_s = round_s
        self._rows: dict[RowId, FakeRow] = {}
        self._rounds = 0

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def admit(self, request: RowRequest) -> None:
        self._rows[request.row_id] = FakeRow(request)

    def retire(self, row_id: RowId) -> None:
        if self._rows.pop(row_id, None) and self._drafter is not None:
            self._drafter.drop(self._id, (row_id,))

    def begin(self) -> None:
        """Its drafts are asked for by ``step``."""

    def step(self) -> RoundReport:
        live = list(self._rows.values())[: self._max_rows]
        started = time.perf_counter()
        drafts = self._draft(live)
        drafted_at = time.perf_counter()
        if self._log is not None:
            self._log.add(time.monotonic(), [row.request.max_tokens for row in live])
            self._round_s = self._log.round_s(self._round_s)
        time.sleep(self._round_s)
        self._rounds += 1
        progress = tuple(self._commit(row, drafts[slot]) for slot, row in enumerate(live))
        for row in progress:
            if row.finish:
                self.retire(row.row_id)
        width = 1 + drafts.shape[1]
        seconds = {"draft": drafted_at - started, "verify": self._round_s}
        return RoundReport(self._id, self._rounds, width, progress, len(live), 0, 0, seconds)

    def close(self) -> None:
        self._rows.clear()
        if self._drafter is not None:
            self._drafter.close(self._id)

    def _draft(self, live: list[FakeRow]) -> np.ndarray:
        if self._drafter is None:
            return np.zeros((len(live), 0), np.int32)
        starts = np.array([row.sent for row in live], np.int32)
        counts = np.array([row.length - row.sent for row in live], np.int32)
        x = np.zeros((len(live), int(counts.max()), DIM), np.float32)
        for slot, row in enumerate(live):
            x[slot, : counts[slot], 0] = np.arange(row.sent, row.length)
            x[slot, :, 1] = row_key(row.prompt)
            for i in range(int(counts[slot])):
                x[slot, i, 2:6] = [script(row.prompt, row.sent + i + 1 + k) for k in range(BLOCK)]
        block = FeatureBlock(tuple(row.request.row_id for row in live), starts, counts, mx.array(x))
        anchors = mx.array([(row.tokens or row.request.tokens)[-1] for row in live])
        drafts = self._drafter.draft(self._id, block, anchors, BLOCK).wait()
        assert drafts.has_taken
        for row in live:
            row.sent = row.length
        return np.array(drafts.ids)

    def _commit(self, row: FakeRow, drafts: np.ndarray) -> RowProgress:
        if FAULT in row.prompt and row.tokens[2:]:
            return RowProgress(row.request.row_id, (), 0, 0, 0, "error", "the row went wrong", "row_failed")
        truth = [script(row.prompt, row.length + k) for k in range(BLOCK)]
        walked = 0
        while walked < len(drafts) and drafts[walked] == truth[walked]:
            walked += 1
        budget = row.request.max_tokens - len(row.tokens)
        committed = tuple(truth[: walked + 1][:budget])
        row.tokens.extend(committed)
        finish = "length" if len(row.tokens) >= row.request.max_tokens else None
        accepted = min(walked, len(committed))
        return RowProgress(row.request.row_id, committed, len(drafts), walked, accepted, finish)


class FakeDrafter:
    """Checks that every row's context is whole and in order, then drafts what the features foretell."""

    block_size = BLOCK

    def __init__(self, draft_s: float = 0.0) -> None:
        self._draft_s = draft_s
        self._contexts: dict[tuple[WindowId, RowId], np.ndarray] = {}

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        x = np.array(block.x)
        for slot, row_id in enumerate(block.row_ids):
            count = int(block.counts[slot])
            if row_id is None or not count:
                continue
            old = self._contexts.get((window_id, row_id), np.zeros((0, DIM), np.float32))
            assert len(old) == block.starts[slot], "context is not where the block starts"
            self._contexts[window_id, row_id] = np.concatenate([old, x[slot, :count]])

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> "Done":
        self.extend(window_id, block)
        time.sleep(self._draft_s)
        ids = np.zeros((len(block.row_ids), width - 1), np.int32)
        for slot, row_id in enumerate(block.row_ids):
            if row_id is not None:
                context = self._contexts[window_id, row_id]
                assert (context[:, 0] == np.arange(len(context))).all(), "positions have gaps"
                assert (context[:, 1] == context[0, 1]).all(), "rows are mixed"
                ids[slot] = context[-1, 2 : 2 + width - 1]
        return Done(Drafts(mx.array(ids), True))

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        for row_id in row_ids:
            self._contexts.pop((window_id, row_id), None)

    def close(self, window_id: WindowId) -> None:
        for key in [key for key in self._contexts if key[0] == window_id]:
            del self._contexts[key]


@dataclass(frozen=True)
class Done:
    drafts: Drafts

    def wait(self) -> Drafts:
        return self.drafts


@dataclass(frozen=True)
class FakeEngine:
    """``deployments.engine.Engine`` over the script."""

    round_s: float = 0.02
    log: RoundLog | None = None
    draft_s: float = 0.0

    def open_target(
        self, settings: Settings, link: DrafterLink | None, loop: asyncio.AbstractEventLoop
    ) -> TargetParts:
        if self.log is not None:
            self.log.await_release()
        exchange = None
        if link is not None:
            transport = Transport(settings.transport, settings.ref_threshold_bytes)
            # Tests count drafts: none is late because the machine is busy.
            patience = Patience(settings.draft_timeout_s, floor_s=settings.draft_timeout_s)
            exchange = RemoteDrafter(link, loop, transport, "fake", BLOCK, patience)
        return TargetParts(fake_lane(settings, exchange, self.round_s, self.log), exchange)

    def open_drafter(self, settings: Settings) -> Sessions:
        return Sessions(FakeDrafter(self.draft_s), "fake", settings.session_ttl_s)

    def open_router(self, settings: Settings) -> RouterParts:
        card = ModelCard(settings.served_model_names, 0, 4096, block_size=BLOCK)
        return RouterParts(card, Tokenizer.load(PAIR / "target"))


def fake_lane(
    settings: Settings, drafter: RemoteDrafter | None, round_s: float, log: RoundLog | None
) -> Lane:
    def open_window(window_id: WindowId) -> FakeWindow:
        return FakeWindow(window_id, drafter, settings.max_rows, round_s, log)

    take: Callable = drafter.transport.take_traffic if drafter is not None else lambda: None
    return Lane(open_window, settings.max_windows, take)


class Probe:
    """Tells what Serve's flags are in its own process."""

    def facts(self) -> dict[str, object]:
        from ray.serve._private import constants

        return {
            "own_thread": constants.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD,
            "own_loop": constants.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP,
            "grpc_limit": constants.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH,
            "blas": os.environ["OPENBLAS_NUM_THREADS"],
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }
