"""One row's answer, message by message, as the progress that a window of ours would have reported."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from deployments.client import RpcEvent
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from dflash_core.events import FinishReason, RowProgress, TokenLogprobs
from dflash_core.request import RowRequest

_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class RemoteRow:
    """Folds events. Each message of tokens is a round, but for the first token, which the prompt gave."""

    request: RowRequest
    has_started: bool = False
    has_tokens: bool = False
    last_at: float | None = None  # when tokens came
    _told: int = 0  # drafts accepted up to now
    _held: pb.Tokens = field(default_factory=pb.Tokens)

    def take(self, event: RpcEvent) -> RowProgress | None:
        """The next progress, if this event makes one."""
        match event:
            case pb.Started():
                self.has_started = True
                return self._progress(pb.Tokens())
            case pb.Tokens():
                if event.tokens and event.tokens[-1].id in self.request.stop_token_ids:
                    self._held.MergeFrom(event)  # a stop token and the end that it brings come as one
                    return None
                return self._progress(event)
            case pb.Finished():
                return self._finish(event)
            case _:
                assert_never(event)

    def fail(self, message: str, kind: str) -> RowProgress:
        """The other side cannot go on with this row, and nobody could."""
        return RowProgress(self.request.row_id, (), 0, 0, 0, "error", message, kind)

    def is_round(self, progress: RowProgress) -> bool:
        """Whether this was a round of the row."""
        return len(progress.tokens) > progress.num_first

    def _finish(self, event: pb.Finished) -> RowProgress:
        """What was drafted beyond what was accepted is told at the end alone."""
        speculation = event.speculation
        before = self._told
        last = self._progress(self._held, _REASONS.get(event.reason, "length"))
        return RowProgress(
            last.row_id,
            last.tokens,
            max(0, speculation.drafted - before),
            max(0, speculation.walked - before),
            last.accepted,
            last.finish,
            logprobs=last.logprobs,
            prompt_logprobs=last.prompt_logprobs,
            cached_tokens=event.usage.cached_tokens,
            num_first=last.num_first,
        )

    def _progress(self, message: pb.Tokens, finish: FinishReason | None = None) -> RowProgress:
        accepted = sum(token.origin == pb.TOKEN_ORIGIN_ACCEPTED for token in message.tokens)
        self._told += accepted
        num_first = int(bool(message.tokens) and not self.has_tokens)
        self.has_tokens |= bool(message.tokens)
        wants = self.request.num_top_logprobs is not None
        return RowProgress(
            self.request.row_id,
            tuple(token.id for token in message.tokens),
            accepted,
            accepted,
            accepted,
            finish,
            logprobs=_numbers(message.tokens) if wants else (),
            prompt_logprobs=_numbers(message.prompt),
            num_first=num_first,
        )


def _numbers(tokens: Iterable[pb.Token]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token.logprob, tuple((other.id, other.logprob) for other in token.top_logprobs))
        for token in tokens
    )
