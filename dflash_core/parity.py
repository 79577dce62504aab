"""The exactness gate: rows played together against the same rows alone, token id by token id.

Kernels differ by shape, so two exact systems may part at a near tie and nowhere else. Where two
sequences first differ, both tokens are scored by replaying the shared prefix alone; the difference
passes if both scores lie within a margin of the best one. What comes after is not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from dflash_core.constraint import allowed_next
from dflash_core.request import RowId, RowRequest
from dflash_core.row import Row
from dflash_core.row_cache import bucket_capacity
from dflash_core.sampling import gumbel, keep_mask, pack, process
from dflash_core.target import Target

DEFAULT_MARGIN = 1.0  # logits

Verdict = Literal["equal", "near_tie", "different"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row's two sequences."""

    row_id: RowId
    verdict: Verdict
    position: int | None = None  # index into the emitted tokens of the first difference
    tokens: tuple[int, int] | None = None  # reference's and candidate's token there
    gap: float = 0.0  # how far the worse of them lies below the best, in logits

    def passes(self, margin: float) -> bool:
        """Whether the rows are equal, or part at a near tie under ``margin`` (strictly)."""
        return self.verdict == "equal" or (self.verdict == "near_tie" and self.gap < margin)


def first_difference(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first unequal token; the shorter's length if it is a prefix; None if equal."""
    for i, (a, b) in enumerate(zip(reference, candidate, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def compare(
    target: Target,
    request: RowRequest,
    reference: Sequence[int],
    candidate: Sequence[int],
    *,
    margin: float = DEFAULT_MARGIN,
) -> Comparison:
    """Compare what one request emitted in two runs.

    A length that differs without a token that differs is always ``different``: rows end by their own
    tokens and budget alone.
    """
    at = first_difference(reference, candidate)
    if at is None:
        return Comparison(request.row_id, "equal")
    if at >= min(len(reference), len(candidate)):
        return Comparison(request.row_id, "different", at, None, float("inf"))
    pair = int(reference[at]), int(candidate[at])
    gap = score_gap(target, request, reference[:at], pair)
    return Comparison(request.row_id, "near_tie" if gap < margin else "different", at, pair, gap)


def score_gap(target: Target, request: RowRequest, said: Sequence[int], tokens: tuple[int, int]) -> float:
    """How far below the best score the worse of ``tokens`` lies once a row has ``said`` so much, in logits.

    Scores are processed logits + T * g. A token that a truncation cuts is also measured by its
    distance to the cut.
    """
    prefix, sampling = (*request.tokens, *said), request.sampling
    row = Row(request)
    row.emitted += said
    arrays = pack([row.sampled()], target.vocab_size)
    if target.grammars is not None and request.grammar is not None:
        moved = replace(request, tokens=prefix, prompt_length=row.prompt_length)
        arrays = arrays.masked(allowed_next(moved, target.grammars, target.vocab_size))
    position = mx.array([[len(prefix)]])
    raw = mx.array(next_logits(target, prefix))[None, None]
    logits = np.array(process(raw, position, arrays))[0, 0]
    scores = logits
    cut_gap = 0.0
    if sampling.temperature > 0:
        noise = gumbel(arrays.keys, position, target.vocab_size)
        scores = logits + sampling.temperature * np.array(noise)[0, 0]
        kept = np.array(keep_mask(mx.array(logits)[None, None], arrays))[0, 0]
        lowest = logits[kept].min()
        cut_gap = max(0.0, *(float(lowest - logits[token]) for token in tokens))
        kept[list(tokens)] = True
        best = scores[kept].max()
    else:
        best = scores.max()
    return max(cut_gap, float(best - min(scores[token] for token in tokens)))


def next_logits(target: Target, prefix: Sequence[int]) -> np.ndarray:
    """Logits [V] after ``prefix``, run alone: its last token by itself, the rest by chunks."""
    caches = target.new_caches(1, bucket_capacity(len(prefix) + 1))
    greedy = pack([None], target.vocab_size)
    body = np.array(prefix[:-1], dtype=np.int32)
    for begin in range(0, len(body), 64):
        chunk = body[begin : begin + 64]
        tokens = np.zeros((1, 64), dtype=np.int32)
        tokens[0, : len(chunk)] = chunk
        target.prefill(caches, tokens, np.array([len(chunk)], dtype=np.int32), greedy)
    return target.next_logits(caches, prefix[-1])
