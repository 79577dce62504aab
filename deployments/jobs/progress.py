"""How far a batch is: a bar on a terminal, plain lines in a job's log."""

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from tqdm import tqdm

from deployments.jobs.results import Result

_LINE_PERIOD_S = 10.0


@dataclass(slots=True)
class Tally:
    """Counts of one run; ``num_skipped`` lines had their answer before it."""

    num_lines: int
    num_skipped: int
    began: float = field(default_factory=time.monotonic)
    num_answered: int = 0
    num_failed: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    codes: dict[str, int] = field(default_factory=dict)  # of failures

    def add(self, result: Result) -> None:
        """Count a result."""
        if not result.is_answered:
            self.num_failed += 1
            code = failure_code(result)
            self.codes[code] = self.codes.get(code, 0) + 1
            return
        self.num_answered += 1
        body = result.document["response"]["body"]
        self.tokens += _count(body, "usage", "completion_tokens") or _count(body, "usage", "output_tokens")
        self.rounds += _count(body, "dflash", "rounds")
        self.accepted += _count(body, "dflash", "accepted")

    @property
    def num_done(self) -> int:
        """Lines that have a result, those of earlier runs included."""
        return self.num_skipped + self.num_answered + self.num_failed

    @property
    def seconds(self) -> float:
        """Since this run began."""
        return max(time.monotonic() - self.began, 1e-6)

    @property
    def accepted_per_round(self) -> float:
        """Drafts accepted per row-round, 0 before the first."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At this run's pace; None before its first line."""
        num_new = self.num_answered + self.num_failed
        return (self.num_lines - self.num_done) * self.seconds / num_new if num_new else None

    def figures(self) -> str:
        """What bar and line both show beside the rows."""
        left = "?" if self.seconds_left is None else tqdm.format_interval(round(self.seconds_left))
        failed = f"{self.num_failed} failed · " if self.num_failed else ""
        return (
            f"{failed}{self.tokens / self.seconds:.1f} tok/s · "
            f"{self.accepted_per_round:.2f} accepted a round · {left} left"
        )


def failure_code(result: Result) -> str:
    """The stable word for why a line failed."""
    error, response = result.document["error"], result.document["response"]
    if error is not None:
        return str(_code(error))
    return str(_code(_section(response["body"], "error")) or f"status_{response['status_code']}")


def _code(error: object) -> object:
    return error.get("code") if isinstance(error, dict) else None


def _count(body: object, section: str, name: str) -> int:
    count = _section(body, section).get(name)
    return count if isinstance(count, int) else 0


def _section(body: object, name: str) -> dict[str, object]:
    section = body.get(name) if isinstance(body, dict) else None
    return section if isinstance(section, dict) else {}


class Progress:
    """Shows a tally as it grows. Call ``show`` often: it minds its own pace."""

    def __init__(self, tally: Tally, out: TextIO | None = None, period_s: float = _LINE_PERIOD_S):
        self._tally = tally
        self._out = out or sys.stderr
        self._period_s = period_s
        self._due = time.monotonic() + period_s
        self._bar = None
        if self._out.isatty():
            self._bar = tqdm(
                total=tally.num_lines,
                initial=tally.num_skipped,
                file=self._out,
                desc="batch",
                bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} rows{postfix}",
                dynamic_ncols=True,
            )

    def show(self) -> None:
        """Bring what is shown up to date, if it is time."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._tally.figures(), refresh=False)
            self._bar.update(self._tally.num_done - self._bar.n)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + self._period_s
            self._line()

    def close(self) -> None:
        """Show the last state."""
        if self._bar is not None:
            self.show()
            self._bar.refresh()
            self._bar.close()
        else:
            self._line()

    def _line(self) -> None:
        tally = self._tally
        print(
            f"batch: {tally.num_done}/{tally.num_lines} rows · {tally.figures()}", file=self._out, flush=True
        )
