"""Events of a generation as messages."""

from typing import assert_never

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from dflash_core.events import TokenLogprobs

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Answer:
    """Folds the events of one generation: the next message of a stream, or all of them in one."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self._accepted = 0  # drafts accepted before the event at hand
        self._whole = pb.GenerateOnceResponse()

    def message(self, event: Event) -> pb.GenerateResponse:
        """The event as the stream has it."""
        match event:
            case Started():
                return pb.GenerateResponse(started=self._started(event))
            case TextTokens():
                return pb.GenerateResponse(tokens=self._tokens(event))
            case Ended():
                return pb.GenerateResponse(finished=_finished(event))
            case _:
                assert_never(event)

    def add(self, event: Event) -> None:
        """Take an event into the whole answer."""
        message = self.message(event)
        match message.WhichOneof("event"):
            case "started":
                self._whole.started.CopyFrom(message.started)
            case "tokens":
                self._whole.tokens.tokens.extend(message.tokens.tokens)
                self._whole.tokens.text += message.tokens.text
                self._whole.tokens.prompt.extend(message.tokens.prompt)
            case _:
                self._whole.finished.CopyFrom(message.finished)

    @property
    def whole(self) -> pb.GenerateOnceResponse:
        """Everything up to now."""
        return self._whole

    def _started(self, event: Started) -> pb.Started:
        return pb.Started(
            id=self._generation.id,
            model=self._generation.model,
            prompt_tokens=len(self._generation.prompt_ids),
            window=event.window,
            lane=event.lane,
        )

    def _tokens(self, event: TextTokens) -> pb.Tokens:
        """A round's leading tokens are its accepted drafts; budget and stops cut at the end.

        What reading the prompt gave stands before them, and is the target's own.
        """
        num_accepted = event.usage.accepted - self._accepted
        self._accepted = event.usage.accepted
        origins = (
            pb.TOKEN_ORIGIN_ACCEPTED if 0 <= index - event.num_first < num_accepted else pb.TOKEN_ORIGIN_BONUS
            for index in range(len(event.token_ids))
        )
        tokens = [
            pb.Token(id=token, origin=origin) for token, origin in zip(event.token_ids, origins, strict=True)
        ]
        for token, number in zip(tokens, event.logprobs, strict=False):  # none unless asked for
            _set_logprob(token, number)
        read = (
            [pb.Token(id=token) for token in self._generation.prompt_ids[1:]] if event.prompt_logprobs else []
        )
        for token, number in zip(read, event.prompt_logprobs, strict=False):
            _set_logprob(token, number)
        return pb.Tokens(tokens=tokens, text=event.text, prompt=read)


def _set_logprob(token: pb.Token, number: TokenLogprobs) -> None:
    token.logprob = number.logprob
    token.top_logprobs.extend(pb.TopLogprob(id=other, logprob=value) for other, value in number.top)


def _finished(event: Ended) -> pb.Finished:
    finished = pb.Finished(
        reason=_REASONS[event.finish_reason],
        usage=_usage(event.usage),
        speculation=_speculation(event.usage),
    )
    match event.stop_reason:
        case int(token):
            finished.stop_token_id = token
        case str(text):
            finished.stop_string = text
        case None:
            pass
    return finished


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _speculation(usage: Usage) -> pb.Speculation:
    return pb.Speculation(
        rounds=usage.rounds, drafted=usage.drafted, walked=usage.walked, accepted=usage.accepted
    )
