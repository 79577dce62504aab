"""One row, one token at a time, in numpy: what every window must say about a request.

The logits are those of the whole text read in one piece. Everything after them is written here again, by
the letter of the server's order: bias, penalties, grammar, temperature, top-k, top-p, min-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from dflash_core.request import RowRequest, Sampling
from dflash_core.sampling import gumbel, seed_key
from tests.core.engine_fixtures import VOCAB, tiny_lane
from tests.core.grammar_fixtures import END, OTHER_END, ascii_tokenizer


@dataclass(frozen=True)
class Spoken:
    """A reference's answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[np.ndarray, ...]  # [V] at each token, of the target's own logits


@cache
def raw_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """The target's logits [V] after a text read in one piece, without any cache kept."""
    target = tiny_lane().target
    caches = target.new_caches(1, 128).arrays
    zero, count = mx.array([0], dtype=mx.int32), mx.array([len(tokens)], dtype=mx.int32)
    hidden, *_ = target.network.prefill(mx.array([tokens], dtype=mx.int32), zero, count, caches)
    return np.array(target.network.logits(hidden))[0].astype(np.float64)


def logprobs_after(tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities [V] of the next token."""
    logits = raw_logits(tuple(tokens))
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def speak(request: RowRequest) -> Spoken:
    """Play a request to its end."""
    at = len(request.tokens) if request.prompt_length is None else request.prompt_length
    prompt, output = list(request.tokens[:at]), list(request.tokens[at:])
    said: list[int] = []
    logprobs: list[np.ndarray] = []
    while len(said) < request.max_tokens:
        logits = processed(raw_logits((*prompt, *output)), prompt, output, request)
        token = choose_one(logits, request.sampling, len(prompt) + len(output))
        logprobs.append(logprobs_after((*prompt, *output)))
        said.append(token)
        output.append(token)
        if token in request.stop_token_ids:
            break
    return Spoken(tuple(said), tuple(logprobs))


def processed(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], request: RowRequest
) -> np.ndarray:
    """Logits [V] after bias, penalties and grammar."""
    settings, logits = request.sampling, logits.copy()
    for token, bias in settings.logit_bias:
        logits[token] += bias
    if len(output) < settings.min_tokens and request.grammar is None:
        logits[list(request.stop_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        factor = settings.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in output:
        logits[token] -= settings.frequency_penalty
    for token in set(output):
        logits[token] -= settings.presence_penalty
    if request.grammar is not None:
        may = np.isin(np.arange(VOCAB), sorted(allowed(request.grammar, tuple(output))))
        early = np.isin(np.arange(VOCAB), sorted(request.stop_token_ids)) & (
            len(output) < settings.min_tokens
        )
        if (may & ~early).any():
            may &= ~early
        logits[~may] = -np.inf
    return logits


@cache
def allowed(grammar: str, said: tuple[int, ...]) -> frozenset[int]:
    """What may come after so much, by a matcher that has seen nothing else."""
    matcher = LLMatcher(_vocabulary(), grammar, log_level=0)
    assert matcher.consume_tokens(list(said)), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[:VOCAB]).tolist())


@cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(ascii_tokenizer().as_json(), n_vocab=VOCAB, eos_token=[END, OTHER_END])


def choose_one(logits: np.ndarray, settings: Sampling, position: int) -> int:
    """The token at an absolute position."""
    if settings.temperature == 0:
        return int(logits.argmax())
    keys = mx.array([seed_key(settings.seed)], dtype=mx.uint32)
    noise = np.array(gumbel(keys, mx.array([[position]], dtype=mx.int32), len(logits)))[0, 0]
    kept = truncated(logits / settings.temperature, settings)
    return int(np.where(kept, logits + settings.temperature * noise, -np.inf).argmax())


def truncated(logits: np.ndarray, settings: Sampling) -> np.ndarray:
    """Which tokens survive [V] bool."""
    order = np.argsort(-logits, kind="stable")
    if settings.top_k:
        order = order[: settings.top_k]
    p = np.exp(logits[order] - logits[order[0]])
    p /= p.sum()
    is_in = np.cumsum(p) - p < settings.top_p
    is_in[0] = True
    order, p = order[is_in], p[is_in]
    kept = np.zeros(len(logits), dtype=bool)
    kept[order[p >= settings.min_p * p[0]]] = True
    return kept
