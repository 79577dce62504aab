"""A request inside the router: what it has been given, what it may still get, and how it ends."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.generation import Ended, Event, Generation, RoundDetail, Source, TextTokens, Usage
from deployments.telemetry import Statistics
from dflash_core import errors
from dflash_core.events import RowProgress
from dflash_core.request import RowId, RowRequest
from dflash_core.text.stream import Piece, TextStream

MAX_FRUITLESS_MOVES = 5  # a row that kills every window it joins must end at some time
SUSPICIOUS_MOVES = 2  # one may be the target's own fault; from here on rows are parted to find whose it is


@dataclass(eq=False)
class Ticket:
    """One choice of a request. Its row may move from window to window; text and counts stay here."""

    generation: Generation
    text: TextStream
    eos_token_ids: frozenset[int]
    arrived: float
    statistics: Statistics
    index: int = 0  # of the choice
    committed: list[int] = field(default_factory=list)
    events: "asyncio.Queue[Event | Exception]" = field(default_factory=asyncio.Queue)
    is_over: bool = False
    was_admitted: bool = False
    has_started: bool = False  # its client knows of a place
    stranded_at: float | None = None  # since when no lane there is may take it
    waited_s: float = 0.0  # from its arrival to its first place
    first_token_at: float | None = None
    last_token_at: float | None = None
    fruitless_moves: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_walked: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    has_prompt_logprobs: bool = False

    @property
    def row_id(self) -> RowId:
        """The row's name in every window."""
        return self.generation.row_id(self.index)

    @property
    def is_unproven(self) -> bool:
        """Whether it lost its last place without having got a token there."""
        return self.fruitless_moves > 0

    def may_join(self, others: "Iterable[Ticket]") -> bool:
        """Whether it may play beside these: a suspect plays with those alone that are above suspicion.

        So whatever it breaks counts against itself and nobody else for long: the others get a token each
        before it is tried again.
        """
        if not self.is_unproven:
            return True
        moves = [ticket.fruitless_moves for ticket in others if ticket.is_unproven]
        return not moves or max(self.fruitless_moves, *moves) < SUSPICIOUS_MOVES

    def row_request(self) -> RowRequest:
        """The row as it stands: prompt and what is committed, and the budget that is left."""
        generation = self.generation
        return RowRequest(
            row_id=self.row_id,
            tokens=generation.prompt_ids + tuple(self.committed),
            # Without an answer a row still has to read its prompt, and that makes a token.
            max_tokens=max(generation.max_tokens - len(self.committed), 1),
            sampling=generation.sampling.for_choice(self.index),
            stop_token_ids=generation.stop_token_ids,
            prompt_length=len(generation.prompt_ids) - generation.num_continued,
            num_top_logprobs=generation.num_top_logprobs,
            save_at=generation.save_at,
            wants_prompt_logprobs=generation.wants_prompt_logprobs and not self.has_prompt_logprobs,
            grammar=generation.grammar,
        )

    def usage(self) -> Usage:
        """Counts up to now."""
        return Usage(
            prompt_tokens=len(self.generation.prompt_ids),
            completion_tokens=len(self.committed),
            cached_tokens=self.num_cached,
            rounds=self.num_rounds,
            drafted=self.num_drafted,
            walked=self.num_walked,
            accepted=self.num_accepted,
        )

    def take(self, row: RowProgress, now: float, *, width: int = 1) -> None:
        """Take what a step committed: text to the client, and the end if this was it.

        ``width`` is the round's; 0 if there was none: a row whose prompt was read in this step may have its
        first token without a round.
        """
        if self.is_over:
            return
        self._count(row, width > 0)
        if row.tokens:
            self.fruitless_moves = 0
            self._note_output(now)
        if row.finish == "error":
            self.fail(_error_of(row))
            return
        if self.generation.max_tokens == 0:
            self._end_without_answer(row)
            return
        delta = self.text.push(row.tokens, is_last_stop=row.finish == "stop")
        used = row.tokens[: delta.num_tokens_used]
        self._count_used(row, len(used))
        self.committed.extend(used)
        text, stop, pieces = delta.text, delta.stop, delta.pieces
        if row.finish is not None and stop is None:
            rest = self.text.finish()
            text, stop, pieces = text + rest.text, rest.stop, pieces + rest.pieces
        if text or used:
            self._tell(text, used, row, self._detail(row, width, len(used), pieces))
        if stop is not None:
            self._end(Ended("stop", self.usage(), stop, self.index))
        elif row.finish == "stop":
            last = row.tokens[-1] if row.tokens else None
            last = None if last in self.eos_token_ids else last
            self._end(Ended("stop", self.usage(), last, self.index))
        elif row.finish == "length":
            self._end(Ended("length", self.usage(), index=self.index))

    def _count(self, row: RowProgress, is_round: bool) -> None:
        self.num_rounds += is_round
        self.num_drafted += row.drafted
        self.num_walked += row.walked
        self.num_cached = max(self.num_cached, row.cached_tokens)

    def _count_used(self, row: RowProgress, num_used: int) -> None:
        self.num_accepted += row.accepted_of(num_used)
        self.statistics.observe_tokens(num_used)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.is_over:
            self.is_over = True
            self.events.put_nowait(error)

    def move(self) -> None:
        """The row's window is over but the row is not; give up if this leads nowhere."""
        self.fruitless_moves += 1
        if self.fruitless_moves > MAX_FRUITLESS_MOVES:
            self.fail(errors.RowFailed("every window that this request joined broke down"))

    def _tell(
        self, text: str, used: tuple[int, ...], row: RowProgress, detail: RoundDetail | None = None
    ) -> None:
        logprobs = row.logprobs[: len(used)]
        self.has_prompt_logprobs |= bool(row.prompt_logprobs)
        told = TextTokens(
            text, used, self.usage(), self.index, logprobs, row.prompt_logprobs, detail, row.num_first
        )
        self.events.put_nowait(told)

    def _detail(
        self, row: RowProgress, width: int, num_used: int, pieces: tuple[Piece, ...]
    ) -> RoundDetail | None:
        if not self.generation.delivery.rounds:
            return None
        sources: tuple[Source, ...] = tuple(_source(row, place) for place in range(num_used))
        return RoundDetail(width, row.drafted, row.walked, row.accepted_of(num_used), sources, pieces)

    def _end_without_answer(self, row: RowProgress) -> None:
        """The prompt is read, and nothing else was asked for; the row's only token is nobody's."""
        if row.tokens:
            if row.prompt_logprobs:
                self._tell("", (), row)
            self._end(Ended("length", self.usage(), index=self.index))

    def _note_output(self, now: float) -> None:
        if self.last_token_at is None:
            self.first_token_at = now
            self.statistics.observe_first_token(now - self.arrived)
        else:
            self.statistics.observe_gap(now - self.last_token_at)
        self.last_token_at = now

    def _end(self, event: Ended) -> None:
        self.is_over = True
        self.events.put_nowait(event)


def _source(row: RowProgress, place: int) -> Source:
    """Where the token at a place of ``row.tokens`` came from."""
    if place < row.num_first:
        return "classic"
    if place < row.num_first + row.accepted:
        return "accepted"
    return "bonus" if row.drafted else "classic"


def _error_of(row: RowProgress) -> errors.DFlashError:
    message = row.error or "the row could not go on"
    leaves = (errors.ContextLengthExceeded, errors.InvalidRequest, errors.DeadlineExceeded)
    return next((leaf(message) for leaf in leaves if leaf.kind == row.error_kind), errors.RowFailed(message))
