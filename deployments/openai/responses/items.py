"""The pieces of a response: messages, thoughts and calls, each with the events by which a stream tells it."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.openai.tools import Call

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    """A unique id, told apart by its prefix as OpenAI's are."""
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(eq=False)
class Message:
    """What the model says to its user."""

    id: str = field(default_factory=lambda: new_id("msg"))
    text: str = ""
    logprobs: list[Json] = field(default_factory=list[Json])

    def opening(self) -> list[Json]:
        """Events behind the one that adds the item."""
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part("", ())}]

    def grow(self, text: str, logprobs: Sequence[Json]) -> list[Json]:
        """Take more text, with the numbers of its tokens if they are told."""
        self.text += text
        self.logprobs.extend(logprobs)
        event = {"type": "response.output_text.delta", "content_index": 0, "delta": text}
        return [event | {"logprobs": list(logprobs)}]

    def closing(self) -> list[Json]:
        """Events before the one that ends the item."""
        done = {"type": "response.output_text.done", "content_index": 0, "text": self.text}
        part = self._part(self.text, self.logprobs)
        return [
            done | {"logprobs": self.logprobs},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def json(self, status: Status) -> Json:
        """The item as a response lists it."""
        content = [] if status == "in_progress" else [self._part(self.text, self.logprobs)]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def _part(text: str, logprobs: Sequence[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


@dataclass(eq=False)
class Thoughts:
    """What the model thinks before it speaks."""

    id: str = field(default_factory=lambda: new_id("rs"))
    text: str = ""

    def opening(self) -> list[Json]:
        """Events behind the one that adds the item."""
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part("")}]

    def grow(self, text: str) -> list[Json]:
        """Take more of them."""
        self.text += text
        return [{"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}]

    def closing(self) -> list[Json]:
        """Events before the one that ends the item."""
        return [
            {"type": "response.reasoning_text.done", "content_index": 0, "text": self.text},
            {"type": "response.content_part.done", "content_index": 0, "part": self._part(self.text)},
        ]

    def json(self, status: Status) -> Json:
        """The item as a response lists it."""
        content = [] if status == "in_progress" else [self._part(self.text)]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    @staticmethod
    def _part(text: str) -> Json:
        return {"type": "reasoning_text", "text": text}


@dataclass(eq=False)
class FunctionCall:
    """A function that the model calls; it comes in one piece."""

    call: Call
    id: str = field(default_factory=lambda: new_id("fc"))

    def opening(self) -> list[Json]:
        """Events behind the one that adds the item."""
        return [{"type": "response.function_call_arguments.delta", "delta": self.call.arguments}]

    def closing(self) -> list[Json]:
        """Events before the one that ends the item."""
        done = {"type": "response.function_call_arguments.done", "name": self.call.name}
        return [done | {"arguments": self.call.arguments}]

    def json(self, status: Status) -> Json:
        """The item as a response lists it."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": "" if status == "in_progress" else self.call.arguments,
        }


Item = Message | Thoughts | FunctionCall
