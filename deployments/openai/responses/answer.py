"""Events of one generation to a response: typed events of a stream, or one object."""

import time
from dataclasses import replace
from typing import TypeVar

from deployments.generation import (
    Ended,
    Event,
    Generation,
    GenerationId,
    Started,
    TextTokens,
    Tokenizer,
    Usage,
)
from deployments.openai import sse
from deployments.openai.answer import speculation
from deployments.openai.errors import ErrorBody
from deployments.openai.logprobs import ChatLogprobs
from deployments.openai.responses.items import FunctionCall, Item, Json, Message, Status, Thoughts, new_id
from deployments.openai.responses.schema import ChosenFunction, ResponsesRequest
from deployments.openai.speech import PLAIN, Reading, Said, Speech

Grows = TypeVar("Grows", Message, Thoughts)


def renamed(generation: Generation) -> Generation:
    """The generation under a response's id."""
    return replace(generation, id=GenerationId(new_id("resp")))


class ResponseAnswer:
    """Folds events into items. A stream tells each event's share; a whole answer is what they add up to."""

    ending = b""  # the last event says itself that it is the last

    def __init__(
        self,
        generation: Generation,
        request: ResponsesRequest,
        tokenizer: Tokenizer,
        reading: Reading = PLAIN,
    ):
        self._generation = generation
        self._request = request
        self._tokenizer = tokenizer
        self._logprobs = ChatLogprobs(tokenizer) if request.wants_logprobs else None
        self._untold: list[Json] = []  # numbers of tokens whose text is held back
        self._speech = Speech(reading)
        self._items: list[Item] = []
        self._is_open = False  # whether the last item may grow
        self._done: list[Json] = []
        self._created = int(time.time())
        self._usage = Usage(len(generation.prompt_ids))
        self._place: Started | None = None
        self._status = "in_progress"
        self._error: Json | None = None
        self._has_begun = False
        self._num_events = 0

    def add(self, event: Event) -> None:
        """Take an event of a whole answer."""
        self._take(event)

    def whole(self) -> Json:
        """The response."""
        is_over = self._status != "in_progress"
        length = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": length,
            "model": self._generation.model,
            "output": list(self._done),
            "usage": self._usage_json() if is_over else None,
            **self._settings(),
            "dflash": speculation(self._usage, self._place),
        }

    def frames(self, event: Event) -> bytes:
        """Take an event of a stream."""
        return self._written(self._take(event))

    def failure(self, body: ErrorBody) -> bytes:
        """Close the stream with a failed response."""
        opening = self._opening()
        self._status = "failed"
        error = body["error"]
        self._error = {"code": "server_error", "message": error["message"], "type": error["type"]}
        return self._written([*opening, {"type": "response.failed", "response": self.whole()}])

    def _written(self, events: list[Json]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            frames.append(sse.typed_frame(event | {"sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(frames)

    def _take(self, event: Event) -> list[Json]:
        match event:
            case Started():
                self._place = event
                return []
            case TextTokens():
                opening = self._opening()
                self._usage = event.usage
                if self._logprobs is not None:
                    self._untold += self._logprobs.write(event.token_ids, event.logprobs)["content"]
                return opening + self._hear(self._speech.hear(event.text))
            case Ended():
                opening = self._opening()
                self._usage = event.usage
                return opening + self._hear(self._speech.hear_out()) + self._end(event)

    def _opening(self) -> list[Json]:
        """What comes before all else, once."""
        if self._has_begun:
            return []
        self._has_begun = True
        return [
            {"type": "response.created", "response": self.whole()},
            {"type": "response.in_progress", "response": self.whole()},
        ]

    def _hear(self, parts: list[Said]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if part.thoughts:
                item, opened = self._growing(Thoughts)
                events += opened + self._numbered(item.grow(part.thoughts))
                self._untold = []  # they are no part of the text
            if part.content:
                item, opened = self._growing(Message)
                numbers, self._untold = self._untold, []
                events += opened + self._numbered(item.grow(part.content, numbers))
            if part.calls:
                self._untold = []
            for call in part.calls:
                events += self._begin(FunctionCall(call)) + self._finish("completed")
        return events

    def _growing(self, kind: type[Grows]) -> tuple[Grows, list[Json]]:
        """The last item if it is of this kind and may grow, else a new one; and the events of that."""
        last = self._items[-1] if self._items else None
        if self._is_open and isinstance(last, kind):
            return last, []
        item = kind()
        return item, self._begin(item)

    def _begin(self, item: Item) -> list[Json]:
        events = self._finish("completed")
        self._items.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "item": item.json("in_progress")}
        return events + self._numbered([added, *item.opening()])

    def _finish(self, status: Status) -> list[Json]:
        """End the item that is open, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        self._done.append(item.json(status))
        done = {"type": "response.output_item.done", "item": self._done[-1]}
        return self._numbered([*item.closing(), done])

    def _numbered(self, events: list[Json]) -> list[Json]:
        """Say which item events are about; those that show it whole have its id inside."""
        place = len(self._items) - 1
        return [
            event | {"output_index": place} | ({} if "item" in event else {"item_id": self._items[-1].id})
            for event in events
        ]

    def _end(self, event: Ended) -> list[Json]:
        is_cut = event.finish_reason == "length"
        # An answer of no words is still an answer: clients read its text.
        opened = self._begin(Message()) if not self._items and not is_cut else []
        closed = self._finish("incomplete" if is_cut else "completed")
        self._status = "incomplete" if is_cut else "completed"
        return [*opened, *closed, {"type": f"response.{self._status}", "response": self.whole()}]

    def _usage_json(self) -> Json:
        usage = self._usage
        thoughts = "".join(item.text for item in self._items if isinstance(item, Thoughts))
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            # A round may straddle the end of the thoughts, so they are counted by their text.
            "output_tokens_details": {
                "reasoning_tokens": len(self._tokenizer.encode(thoughts)) if thoughts else 0
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _settings(self) -> Json:
        """What was asked, with the values that applied."""
        request, sampling = self._request, self._generation.sampling
        tools = [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in request.tools or ()]
        choice = request.tool_choice
        return {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "tools": tools,
            "tool_choice": choice.model_dump() if isinstance(choice, ChosenFunction) else choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": self._text_settings(),
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "metadata": request.metadata or {},
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def _text_settings(self) -> Json:
        text = self._request.text
        format_ = text.format.model_dump() if text is not None and text.format is not None else None
        return {"format": format_ or {"type": "text"}}
