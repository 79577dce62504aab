"""A trial of the loaded pair: how far drafts are walked on the built-in chats, and how fast it is here."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.doctor.chats import CHATS, EXPECTED_WALK, MAX_TOKENS
from deployments.doctor.finding import Finding, ok, warning
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.text import Tokenizer

if TYPE_CHECKING:  # all of these import MLX, which may be what is broken
    from dflash_core.protocols import Drafter
    from dflash_core.target import Target
    from dflash_core.workload import Totals

    Lane = tuple[Target, Drafter]

ROWS = 4
SPEED_S = 10.0
PATIENCE_S = 90.0  # for the chats of the first pass, whose compiles count
LEAST_SHARE = 0.75  # of the expected walk; precision and device change a few near ties
LEAST_WALK = 0.5  # below it a drafter of any kind costs more than it saves: drafting is not free
SLOW_PRODUCT_MS = 12.0  # 1 to 3 with OpenBLAS, 33 without


@dataclass(frozen=True, slots=True)
class Trial:
    """What was played."""

    walk: "Totals"  # the first pass over the chats
    speed: "Totals"  # then for some seconds
    is_whole: bool  # whether the first pass came to its end in time


def run_trial(target: Path, drafter: Path | None, seconds: float = SPEED_S) -> tuple[Trial, str | None]:
    """Load the pair, or a target alone, and play; returns the drafter's fingerprint too.

    Raises CheckpointError.
    """
    lane, fingerprint = _load(target, drafter)
    tokenizer = Tokenizer.load(target)
    requests = [
        RowRequest(
            RowId(str(number)),
            tuple(tokenizer.apply_chat([{"role": "user", "content": chat}])),
            MAX_TOKENS,
            Sampling(),
            tokenizer.eos_token_ids,
        )
        for number, chat in enumerate(CHATS)
    ]
    walk, is_whole = _play(lane, requests, PATIENCE_S)
    speed, _ = _play(lane, requests, seconds, again=True)
    return Trial(walk, speed, is_whole), fingerprint


def _load(target: Path, drafter: Path | None) -> "tuple[Lane, str | None]":
    from deployments.exchange.absent import NoDrafter
    from dflash_core.loading import build_target, load_lane

    if drafter is None:
        return (build_target(target, None)[0], NoDrafter()), None
    lane = load_lane(target, drafter)
    return (lane.target, lane.drafter), lane.drafter_spec.fingerprint


def _play(
    lane: "Lane", requests: list[RowRequest], seconds: float, *, again: bool = False
) -> "tuple[Totals, bool]":
    """Play all requests in one window, over and over if ``again``, for at most ``seconds``."""
    from dflash_core.width import FixedWidth
    from dflash_core.window import Window, WindowPolicy
    from dflash_core.workload import Totals

    target, drafter = lane
    policy = WindowPolicy(width=FixedWidth(drafter.block_size), max_rows=ROWS)
    window = Window(WindowId("doctor"), target, drafter, policy)
    totals = Totals()
    began = time.perf_counter()
    try:
        while True:
            for request in requests:
                window.admit(request)
            while window.has_work:
                step_began = time.perf_counter()
                totals.add(window.step(), time.perf_counter() - step_began)
                totals.seconds = time.perf_counter() - began
                if totals.seconds > seconds:
                    return totals, False
            if not again:
                return totals, True
    finally:
        window.close()


def product_ms() -> float:
    """The best of some float32 products [64, 256] by [256, 8192], the shape of the embedded pair's head."""
    import mlx.core as mx

    a, b = mx.ones((64, 256)), mx.ones((256, 8192))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def check_product(milliseconds: float) -> Finding:
    """Whether MLX multiplies with the library that was loaded for it."""
    message = f"a float32 product [64, 256] x [256, 8192] takes {milliseconds:.1f} ms"
    if milliseconds <= SLOW_PRODUCT_MS:
        return ok("product", message, milliseconds=milliseconds)
    remedy = "see to the blas finding; if that is well, this machine is busy: try again when it is not"
    return warning("product", message, remedy, milliseconds=milliseconds)


def check_trial(trial: Trial, fingerprint: str | None) -> Iterator[Finding]:
    """Hold the walk against the model card's figure, if there is a drafter, and tell the speed."""
    if fingerprint is not None:
        walk, expected = trial.walk.per_row_round(trial.walk.walked), EXPECTED_WALK.get(fingerprint)
        facts = {"walked": walk, "row_rounds": trial.walk.row_rounds, "expected": expected}
        yield _walk_finding(walk, trial, facts)
    speed = trial.speed
    message = f"{speed.tokens_per_second:.1f} tok/s over {speed.seconds:.1f} s, {ROWS} rows, prompts included"
    yield ok("speed", message, tokens_per_second=speed.tokens_per_second, rounds=speed.rounds, rows=ROWS)


def _walk_finding(walk: float, trial: Trial, facts: dict) -> Finding:
    seen = f"{walk:.2f} drafts walked a row-round on the built-in chats"
    expected = facts["expected"]
    if not trial.is_whole:
        remedy = "the machine is too slow for this model, or busy: see the speed, and try a smaller target"
        return warning("acceptance", f"{seen}, of which only a part was played in time", remedy, **facts)
    if expected is None and walk < LEAST_WALK:
        remedy = "see that the drafter was made for this very target; if it was, serve with --drafter none"
        return warning("acceptance", f"{seen}: so few do not pay", remedy, **facts)
    if expected is None:
        return ok(
            "acceptance", f"{seen}; hold it against the drafter's model card: none is known here", **facts
        )
    if walk < LEAST_SHARE * expected:
        remedy = "the files may be damaged or changed: fetch them again, then run dflash-serve parity"
        return warning("acceptance", f"{seen}, {expected:.2f} expected by its model card", remedy, **facts)
    return ok("acceptance", f"{seen}, {expected:.2f} by its model card", **facts)
