"""Events of one generation to the objects that a client gets, chunk by chunk or whole."""

import time

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Tokenizer, Usage
from deployments.openai import sse
from deployments.openai.choice import Choice, Dialect, Json
from deployments.openai.errors import ErrorBody
from deployments.openai.logprobs import ChatLogprobs, CompletionLogprobs
from deployments.openai.said import delta_json, message_json
from deployments.openai.speech import PLAIN, Reading, Speech

CHAT = Dialect(
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda said: {"delta": delta_json(said)},
    closing={"delta": {}},
    whole=lambda said: {"message": message_json(said)},
    has_prompt_ids_in_choice=False,
    logprobs=ChatLogprobs,
)

COMPLETION = Dialect(
    whole_object="text_completion",
    chunk_object="text_completion",
    opening=None,
    delta=lambda said: {"text": said.content},
    closing={"text": ""},
    whole=lambda said: {"text": said.content},
    has_prompt_ids_in_choice=True,
    logprobs=CompletionLogprobs,
)


def usage_json(usage: Usage) -> Json:
    """Write usage as OpenAI does; the drafts are its "predictions"."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


class Answer:
    """Folds events. A stream sends what ``chunks`` gives for each; a whole answer is the same, collected."""

    ending = sse.DONE

    def __init__(
        self, generation: Generation, dialect: Dialect, tokenizer: Tokenizer, reading: Reading = PLAIN
    ):
        self._generation = generation
        self._dialect = dialect
        self._created = int(time.time())
        self._place: Started | None = None
        self._choices = [
            Choice(
                generation,
                dialect,
                index,
                dialect.logprobs(tokenizer),
                Usage(len(generation.prompt_ids)),
                Speech(reading),
            )
            for index in range(generation.num_choices)
        ]
        self._has_prompt_ids = False  # whether they are out

    def frames(self, event: Event) -> bytes:
        """Take an event and return what it puts on a stream."""
        return b"".join(map(sse.frame, self.chunks(event)))

    def failure(self, body: ErrorBody) -> bytes:
        """What a stream says when it breaks off."""
        return sse.frame(body)

    def chunks(self, event: Event) -> list[Json]:
        """Take an event and return the chunks it gives a stream."""
        if isinstance(event, Started):
            self.add(event)
            return []
        choice = self._choices[event.index]
        before = self._running
        self.add(event)
        if not self._shows(event, choice):
            return []
        opening: list[Json] = []
        if not choice.is_open:
            choice.is_open = True
            opening = [self._chunk(entry, before) for entry in choice.opening()]
        match event:
            case TextTokens():
                return [*opening, self._chunk(choice.delta(event), self._running)]
            case Ended():
                rest = [self._chunk(choice.rest(), self._running)] if choice.heard else []
                return [*opening, *rest, *self._closing(choice)]

    def _shows(self, event: TextTokens | Ended, choice: Choice) -> bool:
        match event:
            case TextTokens():
                # Text held back leaves a round with nothing to show, unless numbers were asked for.
                delivery = self._generation.delivery
                wants_numbers = delivery.return_token_ids or delivery.continuous_usage or delivery.rounds
                return bool(choice.heard) or wants_numbers or bool(event.logprobs)
            case Ended():
                return True

    def add(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Started):
            self._place = event
        else:
            self._choices[event.index].add(event)

    def whole(self) -> Json:
        """Return the answer in one object, once every choice has ended."""
        choices = [choice.whole() for choice in self._choices]
        answer = self._with_prompt_ids(self._envelope(self._dialect.whole_object, choices))
        return answer | {"usage": usage_json(self._usage), "dflash": speculation(self._usage, self._place)}

    @property
    def _usage(self) -> Usage:
        return Usage.total([choice.usage for choice in self._choices])

    @property
    def _running(self) -> Usage | None:
        """What each chunk tells of the usage up to now; None to clients that did not ask."""
        return self._usage if self._generation.delivery.continuous_usage else None

    def _closing(self, choice: Choice) -> list[Json]:
        last = self._chunk(choice.closing(), self._running)
        last["dflash"] = speculation(choice.usage, self._place)
        is_over = all(other.ended is not None for other in self._choices)
        if not self._generation.delivery.include_usage or not is_over:
            return [last]
        usage = self._envelope(self._dialect.chunk_object, [])
        numbers = {"usage": usage_json(self._usage), "dflash": speculation(self._usage, self._place)}
        return [last, usage | numbers]

    def _chunk(self, choice: Json, usage: Usage | None) -> Json:
        chunk = self._envelope(self._dialect.chunk_object, [choice])
        if not self._has_prompt_ids:
            self._has_prompt_ids = True
            self._with_prompt_ids(chunk)
        if usage is not None:
            chunk["usage"] = usage_json(usage)
        elif self._generation.delivery.include_usage:
            chunk["usage"] = None
        return chunk

    def _envelope(self, object_: str, choices: list[Json]) -> Json:
        return {
            "id": self._generation.id,
            "object": object_,
            "created": self._created,
            "model": self._generation.model,
            "choices": choices,
        }

    def _with_prompt_ids(self, body: Json) -> Json:
        if self._generation.delivery.return_token_ids and not self._dialect.has_prompt_ids_in_choice:
            body["prompt_token_ids"] = list(self._generation.prompt_ids)
        return body


def speculation(usage: Usage, place: Started | None) -> Json:
    """The ``dflash`` object of an answer: what speculation gave it, and where it was played."""
    return {
        "rounds": usage.rounds,
        "drafted": usage.drafted,
        "walked": usage.walked,
        "accepted": usage.accepted,
        "mean_accept": round(usage.mean_accept, 4),
        "window": place.window if place else None,
        "lane": place.lane if place else None,
    }
