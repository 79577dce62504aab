"""Events of one generation to the objects that a client gets, chunk by chunk or whole."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.generation import Ended, Event, Generation, Started, TextTokens, Usage
from deployments.openai.said import delta_json, message_json
from deployments.openai.speech import PLAIN, Reading, Said, Speech

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the two endpoints differ."""

    whole_object: str
    chunk_object: str
    opening: Json | None  # the first choice of a stream, before any text
    delta: Callable[[Said], Json]
    closing: Json
    whole: Callable[[Said], Json]
    has_prompt_ids_in_choice: bool


CHAT = Dialect(
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda said: {"delta": delta_json(said)},
    closing={"delta": {}},
    whole=lambda said: {"message": message_json(said)},
    has_prompt_ids_in_choice=False,
)

COMPLETION = Dialect(
    whole_object="text_completion",
    chunk_object="text_completion",
    opening=None,
    delta=lambda said: {"text": said.content},
    closing={"text": ""},
    whole=lambda said: {"text": said.content},
    has_prompt_ids_in_choice=True,
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

    def __init__(self, generation: Generation, dialect: Dialect, reading: Reading = PLAIN):
        self._generation = generation
        self._dialect = dialect
        self._created = int(time.time())
        self._place: Started | None = None
        self._speech = Speech(reading)
        self._said: list[Said] = []
        self._token_ids: list[int] = []
        self._usage = Usage(len(generation.prompt_ids))
        self._is_open = False  # whether the stream's first chunk is out

    def chunks(self, event: Event) -> list[Json]:
        """Take an event and return the chunks it gives a stream."""
        said = self._hear(event)
        if not self._shows(event, said):
            self._count(event)
            return []
        opening = self._opening()  # with the usage before this event
        self._count(event)
        match event:
            case TextTokens(_, token_ids):
                return [*opening, self._chunk(self._dialect.delta(said), token_ids)]
            case Ended():
                rest = [self._chunk(self._dialect.delta(said), ())] if said else []
                return [*opening, *rest, *self._closing(event)]
            case Started():
                return []

    def _shows(self, event: Event, said: Said) -> bool:
        match event:
            case TextTokens():
                # Text held back leaves a round with nothing to show, unless numbers were asked for.
                delivery = self._generation.delivery
                return bool(said) or delivery.return_token_ids or delivery.continuous_usage
            case _:
                return isinstance(event, Ended)

    def add(self, event: Event) -> None:
        """Take an event."""
        self._said.append(self._hear(event))
        self._count(event)

    def _hear(self, event: Event) -> Said:
        match event:
            case TextTokens(text):
                return self._speech.push(text)
            case Ended():
                return self._speech.finish()
            case Started():
                return Said()

    def _count(self, event: Event) -> None:
        match event:
            case Started():
                self._place = event
            case TextTokens():
                self._token_ids.extend(event.token_ids)
                self._usage = event.usage
            case Ended():
                self._usage = event.usage

    def whole(self, ended: Ended) -> Json:
        """Return the answer in one object."""
        choice = self._dialect.whole(Said.joined(self._said)) | self._finish(ended)
        answer = self._envelope(self._dialect.whole_object, [self._choice(choice, tuple(self._token_ids))])
        self._add_prompt_ids(answer)
        return answer | {"usage": usage_json(self._usage), "dflash": self._speculation()}

    def _opening(self) -> list[Json]:
        if self._is_open or self._dialect.opening is None:
            return []
        return [self._chunk(self._dialect.opening, ())]

    def _closing(self, ended: Ended) -> list[Json]:
        last = self._chunk(self._dialect.closing | self._finish(ended), ())
        last["dflash"] = self._speculation()
        if not self._generation.delivery.include_usage:
            return [last]
        usage = self._envelope(self._dialect.chunk_object, [])
        return [last, usage | {"usage": usage_json(self._usage), "dflash": self._speculation()}]

    def _chunk(self, content: Json, token_ids: tuple[int, ...]) -> Json:
        delivery = self._generation.delivery
        chunk = self._envelope(self._dialect.chunk_object, [self._choice(content, token_ids)])
        if not self._is_open:
            self._add_prompt_ids(chunk)
            self._is_open = True
        if delivery.continuous_usage:
            chunk["usage"] = usage_json(self._usage)
        elif delivery.include_usage:
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

    def _choice(self, content: Json, token_ids: tuple[int, ...]) -> Json:
        choice = {"index": 0, **content, "logprobs": None}
        choice.setdefault("finish_reason", None)
        if self._generation.delivery.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _add_prompt_ids(self, body: Json) -> None:
        if self._generation.delivery.return_token_ids:
            holder = body["choices"][0] if self._dialect.has_prompt_ids_in_choice else body
            holder["prompt_token_ids"] = list(self._generation.prompt_ids)

    def _speculation(self) -> Json:
        usage = self._usage
        return {
            "rounds": usage.rounds,
            "drafted": usage.drafted,
            "walked": usage.walked,
            "accepted": usage.accepted,
            "mean_accept": round(usage.mean_accept, 4),
            "window": self._place.window if self._place else None,
            "lane": self._place.lane if self._place else None,
        }

    def _finish(self, ended: Ended) -> Json:
        has_called = self._speech.num_calls > 0 and ended.finish_reason == "stop"
        reason = "tool_calls" if has_called else ended.finish_reason
        return {"finish_reason": reason, "stop_reason": ended.stop_reason}
