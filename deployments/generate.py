"""``dflash-serve generate``: one answer in this process, no Ray, streamed to a terminal.

A window with one row, played by the same loop as everywhere. Knows nothing of flags or exit codes.
"""

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from deployments.generation import SamplingDefaults
from deployments.pairing import resolve_pair
from deployments.settings import EMBEDDED
from dflash_core import blas
from dflash_core.errors import InvalidRequest, RowFailed
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.text import TextStream, Tokenizer
from dflash_core.text.files import read_json

if TYPE_CHECKING:  # MLX comes after the BLAS
    from dflash_core.window import Window

DEFAULT_MAX_TOKENS = 1024
MEASURING_S = 3.0  # at most, for the costs of all widths
ROW = RowId("0")
WINDOW = WindowId("generate")


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What was asked for; None leaves it to the checkpoint's generation config."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # None: drawn

    def resolve(self, defaults: SamplingDefaults) -> Sampling:
        """Fill in what was left out."""
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            repetition_penalty=defaults.repetition_penalty,
        )


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One generation as the command line describes it."""

    prompt: str
    target: str = EMBEDDED
    drafter: str | None = EMBEDDED  # None: every round is classic
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    max_tokens: int | None = None  # None: what the context leaves, up to DEFAULT_MAX_TOKENS
    width: int | None = None  # None: chosen per round from measured costs
    stop: tuple[str, ...] = ()
    system: str | None = None
    is_raw: bool = False  # the prompt as it is, without chat template
    cache_dir: Path | None = None  # keeps the measured costs of all widths; None: nothing is kept


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a finished generation."""

    tokens: int
    rounds: int
    accepted: int  # without the bonus tokens
    prefill_s: float
    rounds_s: float
    seed: int | None  # None: greedy

    def __str__(self) -> str:
        per_round = self.accepted / self.rounds if self.rounds else 0.0
        # The first token is the prefill's, not a round's.
        rate = (self.tokens - 1) / self.rounds_s if self.rounds else 0.0
        parts = [
            f"{self.tokens} tokens",
            f"{self.rounds} rounds",
            f"{per_round:.2f} accepted per round",
            f"{rate:.1f} tok/s",
            f"first token after {self.prefill_s:.3f} s",
        ]
        return " · ".join(parts if self.seed is None else [*parts, f"seed {self.seed}"])


def generate(options: GenerateOptions, out: TextIO) -> Summary:
    """Write the answer to ``out`` as it comes. Raises DFlashError."""
    blas.prepare()
    target_path, drafter_path = resolve_pair(options.target, options.drafter)
    tokenizer = Tokenizer.load(target_path)
    prompt_ids = _prompt_ids(options, tokenizer)
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    config = read_json(target_path / "generation_config.json")
    window = _open_window(target_path, drafter_path, options)
    request = RowRequest(
        row_id=ROW,
        tokens=prompt_ids,
        max_tokens=options.max_tokens or _room(window, prompt_ids),
        sampling=options.sampling.resolve(SamplingDefaults.of_generation_config(config)),
        stop_token_ids=tokenizer.eos_token_ids,
    )
    window.admit(request)
    return _play(window, request, TextStream(tokenizer, options.stop), out)


def _prompt_ids(options: GenerateOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    if options.is_raw:
        return tuple(tokenizer.encode(options.prompt))
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return tuple(tokenizer.apply_chat(messages))


def _open_window(target_path: Path, drafter_path: Path | None, options: GenerateOptions) -> "Window":
    """Load both models and open a window of one row."""
    from deployments.exchange.absent import NoDrafter
    from deployments.measuring import Circumstances, width_costs
    from dflash_core.acceptance import Acceptance
    from dflash_core.loading import build_drafter, build_target
    from dflash_core.width import AutoWidth, FixedWidth
    from dflash_core.window import Window, WindowPolicy

    target, spec = build_target(target_path, drafter_path)
    if drafter_path is None:
        policy = WindowPolicy(width=FixedWidth(1), max_rows=1)
        return Window(WINDOW, target, NoDrafter(), policy)
    drafter, drafter_spec = build_drafter(target_path, drafter_path)
    if options.width is None:
        here = Circumstances(
            spec.fingerprint, drafter_spec.fingerprint, max_rows=1, is_packed=target.network.is_packed
        )
        costs = width_costs(target, drafter, here, options.cache_dir, budget_s=MEASURING_S)
        width = AutoWidth(costs, Acceptance(drafter.block_size))
    else:
        width = FixedWidth(options.width)
    return Window(WINDOW, target, drafter, WindowPolicy(width=width, max_rows=1))


def _room(window: "Window", prompt_ids: tuple[int, ...]) -> int:
    # At least 1: a prompt that fills the context is refused by the window, in its own words.
    return max(1, min(DEFAULT_MAX_TOKENS, window.target.max_context - len(prompt_ids)))


def _play(window: "Window", request: RowRequest, text: TextStream, out: TextIO) -> Summary:
    """Play the window's only row to its end, writing its text after each round."""
    tokens = rounds = accepted = 0
    prefill_s = rounds_s = 0.0
    while window.has_work:
        report = window.step()
        prefill_s += report.seconds["prefill"]
        rounds_s += sum(report.seconds.values()) - report.seconds["prefill"]
        for row in report.rows:
            if row.finish == "error":
                raise RowFailed(row.error or "the row failed")
            delta = text.push(row.tokens, is_last_stop=row.finish == "stop")
            if delta.stopped:
                window.retire(ROW)
            out.write(delta.text)
            out.flush()
            rounds += report.width > 0
            tokens += delta.num_tokens_used
            accepted += row.accepted_of(delta.num_tokens_used)
    out.write(text.finish().text + "\n")
    out.flush()
    seed = request.sampling.seed if request.sampling.temperature > 0 else None
    return Summary(tokens, rounds, accepted, prefill_s, rounds_s, seed)
