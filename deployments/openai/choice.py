"""One of a request's answers as it grows: its text, its tokens and what is told about them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deployments.generation import Ended, Generation, TextTokens, Tokenizer, Usage
from deployments.openai.logprobs import ChatLogprobs, CompletionLogprobs
from deployments.openai.rounds import round_json
from deployments.openai.speech import Said, Speech
from dflash_core.events import TokenLogprobs

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
    logprobs: Callable[[Tokenizer], ChatLogprobs | CompletionLogprobs]


@dataclass(eq=False)
class Choice:
    """Folds the events of one choice."""

    generation: Generation
    dialect: Dialect
    index: int
    logprobs: ChatLogprobs | CompletionLogprobs
    usage: Usage
    speech: Speech
    heard: Said = field(default_factory=Said)  # what the last event added
    ended: Ended | None = None
    is_open: bool = False  # whether the stream's first chunk of it is out
    _said: list[Said] = field(default_factory=list[Said])
    _token_ids: list[int] = field(default_factory=list[int])
    _numbers: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    _rounds: list[Json] = field(default_factory=list[Json])  # of those who ask
    _prompt_numbers: tuple[TokenLogprobs, ...] = ()
    _has_prompt_ids: bool = False  # whether they are out

    def add(self, event: TextTokens | Ended) -> None:
        """Take an event."""
        self.usage = event.usage
        match event:
            case TextTokens():
                self.heard = self.speech.push(event.text)
                self._token_ids.extend(event.token_ids)
                self._numbers.extend(event.logprobs)
                self._prompt_numbers = self._prompt_numbers or event.prompt_logprobs
                played = self._round(event)
                if played is not None and not self.generation.delivery.stream:
                    self._rounds.append(played)
            case Ended():
                self.heard = self.speech.finish()
                self.ended = event
        self._said.append(self.heard)

    def whole(self) -> Json:
        """The choice of a whole answer."""
        said = Said.joined([Said(self.generation.echo or ""), *self._said])
        told = self._tell(tuple(self._token_ids), tuple(self._numbers), has_prompt=True)
        entry = self._entry(self.dialect.whole(said) | self._finish(), tuple(self._token_ids), told)
        return entry | ({"dflash": {"rounds": self._rounds}} if self.generation.delivery.rounds else {})

    def opening(self) -> list[Json]:
        """What a stream begins with, before the first text; known once the first event is added."""
        entries: list[Json] = []
        if self.dialect.opening is not None:
            entries.append(self._entry(self.dialect.opening, (), None))
        if self.generation.echo is not None:
            told = self._tell((), (), has_prompt=True)
            entries.append(self._entry(self.dialect.delta(Said(self.generation.echo)), (), told))
        return entries

    def delta(self, event: TextTokens) -> Json:
        """What a stream says of an event."""
        told = self._tell(event.token_ids, event.logprobs, has_prompt=False)
        entry = self._entry(self.dialect.delta(self.heard), event.token_ids, told)
        played = self._round(event)
        return entry | ({} if played is None else {"dflash": played})

    def _round(self, event: TextTokens) -> Json | None:
        return round_json(event, self.generation.row_id(self.index))

    def rest(self) -> Json:
        """What a stream says of text that was held back to the end; its tokens are out."""
        return self._entry(self.dialect.delta(self.heard), (), None)

    def closing(self) -> Json:
        """What a stream ends with."""
        return self._entry(self.dialect.closing | self._finish(), (), None)

    def _finish(self) -> Json:
        assert self.ended is not None
        has_called = self.speech.num_calls > 0 and self.ended.finish_reason == "stop"
        return finish(self.ended) | ({"finish_reason": "tool_calls"} if has_called else {})

    def _tell(
        self, token_ids: tuple[int, ...], numbers: tuple[TokenLogprobs, ...], *, has_prompt: bool
    ) -> Json | None:
        if self.generation.num_top_logprobs is None:
            return None
        if not has_prompt or self.generation.echo is None:
            return self.logprobs.write(token_ids, numbers)
        ids = (*self.generation.prompt_ids, *token_ids)
        told = (None, *self._prompt_numbers, *numbers)
        return self.logprobs.write(ids, told, num_prompt=len(self.generation.prompt_ids))

    def _entry(self, content: Json, token_ids: tuple[int, ...], logprobs: Json | None) -> Json:
        choice = {"index": self.index, **content, "logprobs": logprobs}
        choice.setdefault("finish_reason", None)
        if self.generation.delivery.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if self.dialect.has_prompt_ids_in_choice and not self._has_prompt_ids:
                self._has_prompt_ids = True
                choice["prompt_token_ids"] = list(self.generation.prompt_ids)
        return choice


def finish(ended: Ended) -> Json:
    """Why a choice ended."""
    return {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}
