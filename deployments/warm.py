"""Play every shape once before a replica is ready: a first compile costs seconds, and a client would wait."""

import logging
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np

from deployments.exactness import find_out
from deployments.exchange.messages import DraftCall, Piece, RowFeatures
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.sessions import Sessions
from deployments.measuring import Circumstances, width_costs
from deployments.settings import Settings
from dflash_core.calibration import GivenWidth
from dflash_core.checkpoints import DrafterSpec
from dflash_core.costs import RoundCosts
from dflash_core.probe import Findings, shapes_to_probe
from dflash_core.protocols import Drafts, FeatureBlock, Ready
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.row_cache import row_buckets
from dflash_core.saved_row import copy_in, copy_out
from dflash_core.target import Target
from dflash_core.width import WIDTHS, widths_up_to
from dflash_core.window import Window, WindowPolicy

logger = logging.getLogger("dflash.warm")

WINDOW = WindowId("warm-up")
PROMPT_TOKENS = 20
DRAFTER_WAIT_S = 60.0
ENDLESS = "start: /(?s:.){99999,}/"  # a grammar that allows everything but the end
_BIAS = ((0, 1.0),)
RARER = (
    Sampling(logit_bias=_BIAS),
    Sampling(presence_penalty=1.0),
    Sampling(temperature=1.0, logit_bias=_BIAS),
    Sampling(temperature=1.0, presence_penalty=1.0),
    Sampling(temperature=1.0, top_p=0.9, logit_bias=_BIAS, presence_penalty=1.0),
)


def warm_target(target: Target, max_rows: int, widest: int) -> None:
    """Verify at each row bucket: every width greedily, the widest and classic with each way to sample.

    Rarer wishes only alone and in company: that compiles their kernels; more rows are another shape.
    """
    began = time.perf_counter()
    _play_through(target, max_rows, widths_up_to(widest), Sampling())
    widths = sorted({1, widest})
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)):
        _play_through(target, max_rows, widths, sampling)
    for sampling in RARER:
        _play_through(target, min(max_rows, 2), widths, sampling)
    _play_through(target, min(max_rows, 2), widths, Sampling(), num_top_logprobs=5)
    if target.grammars is not None and target.grammars.prepare():
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            _play_through(target, min(max_rows, 2), widths, sampling, grammar=ENDLESS)
    logger.info("target warmed in %.1f s", time.perf_counter() - began)


def warm_copies(target: Target) -> None:
    """Save a row and begin another from it: some backends compile these copies, too, when first used."""
    caches = target.new_caches(2, PROMPT_TOKENS)
    caches.lengths[1] = PROMPT_TOKENS
    copy_in(caches, 0, copy_out(caches, 1))
    arrays = caches.arrays
    mx.eval(arrays.keys, arrays.values, arrays.states, arrays.conv)


def _play_through(
    target: Target,
    max_rows: int,
    widths: list[int],
    sampling: Sampling,
    num_top_logprobs: int | None = None,
    grammar: str | None = None,
) -> None:
    """Let rows join as they do in service, up to each bucket, and play a round of each width there."""
    given = GivenWidth()
    window = Window(WINDOW, target, _Guess(), WindowPolicy(width=given, max_rows=max_rows))
    budget = min(max(64, 16 * max(widths)), target.max_context - PROMPT_TOKENS)
    for rows in (min(bucket, max_rows) for bucket in row_buckets(max_rows)):
        given.width = 1
        for row in range(window.num_rows, rows):
            request = RowRequest(RowId(str(row)), tuple(range(PROMPT_TOKENS)), budget, sampling)
            scores = num_top_logprobs is not None
            request = replace(request, num_top_logprobs=num_top_logprobs, wants_prompt_logprobs=scores)
            window.admit(replace(request, grammar=grammar))
        while window.has_work and window.num_live < rows:
            window.step()
        for given.width in widths:
            window.step()
    window.close()


def warm_drafter(sessions: Sessions, spec: DrafterSpec, dtype: str, max_rows: int, widest: int) -> None:
    """Take prompts and draft at each row bucket and width, with one feature a row and with a block."""
    began = time.perf_counter()
    widths = [width for width in WIDTHS if 1 < width <= widest]
    counts = [(PROMPT_TOKENS, widest), *((count, width) for width in widths for count in (1, width))]
    for rows in row_buckets(max_rows):
        row_ids = tuple(RowId(str(row)) for row in range(rows))
        held = 0
        for number, (count, width) in enumerate(counts):
            x = np.zeros((count, spec.hidden_size), np.uint16 if dtype == "bfloat16" else dtype)
            features = tuple(RowFeatures(r, held, (Piece(held, count, x),)) for r in row_ids)
            anchors = np.zeros(rows, np.int32)
            size = spec.hidden_size * x.itemsize
            call = DraftCall(WINDOW, number, spec.fingerprint, dtype, size, row_ids, features, anchors, width)
            sessions.draft(call)
            held += count
        sessions.close(WINDOW)
    logger.info("drafter warmed in %.1f s", time.perf_counter() - began)


def findings_of(settings: Settings, target: Target, fingerprint: str, widest: int) -> Findings:
    """What the probe says of every shape that rounds may use."""
    where = Circumstances(
        fingerprint,
        drafter="",
        max_rows=0,
        threads=settings.blas_threads,
        is_packed=target.network.is_packed,
    )
    shapes = shapes_to_probe(settings.max_rows, widest)
    # Where bits decide what is played, a verdict is today's: BLAS threads or an upgrade may have changed.
    cache_dir = None if settings.strict else settings.cache_dir
    return find_out(target, shapes, where, cache_dir, settings.probe_s)


def measured_costs(
    settings: Settings, target: Target, drafter: RemoteDrafter, target_fingerprint: str
) -> RoundCosts | None:
    """What rounds cost here, the exchange included; None where the width is given or nobody drafts.

    At start: before the transport's counts are first taken.
    """
    if settings.block_width is not None or settings.calibration_s == 0:
        return None
    if not drafter.wait_for_drafter(DRAFTER_WAIT_S):
        return None

    def has_drafted() -> bool:  # rounds that failed to draft were classic, and say nothing
        return drafter.transport.num_failures == 0

    try:
        circumstances = Circumstances(
            target_fingerprint,
            drafter.fingerprint,
            settings.max_rows,
            settings.transport,
            settings.blas_threads,
            target.network.is_packed,
        )
        with drafter.patience.waived(DRAFTER_WAIT_S):  # a compile is no failure
            costs = width_costs(
                target,
                drafter,
                circumstances,
                settings.cache_dir,
                budget_s=settings.calibration_s,
                is_sound=has_drafted,
            )
        return costs if has_drafted() else None
    finally:
        drafter.transport.take_traffic()  # no request's


class _Guess:
    """Drafts token 0 everywhere; that is as good as any for a warm-up."""

    block_size = 1 << 10

    def extend(self, window_id: WindowId, block: FeatureBlock) -> None:
        """Nothing to keep."""

    def draft(self, window_id: WindowId, block: FeatureBlock, anchors: mx.array, width: int) -> Ready:
        """All zeros."""
        return Ready(Drafts(mx.zeros((len(block.row_ids), width - 1), dtype=mx.int32), has_taken=True))

    def drop(self, window_id: WindowId, row_ids: tuple[RowId, ...]) -> None:
        """Nothing to forget."""

    def close(self, window_id: WindowId) -> None:
        """Nothing to forget."""
