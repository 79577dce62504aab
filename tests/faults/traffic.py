"""Steady traffic behind an event: clients that ask again and again, and what became of their answers."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tests.faults.application import KEYS, Application
from tests.faults.streams import Client, Heard, HttpClient, Question, RpcClient, Sample, in_turn

QUESTIONS = (
    Question("What is the capital of France?", 100),
    Question("Write a Python function that reverses a string.", 140),
    Question("Give me a JSON object with a name and an age.", 120, temperature=1.0, seed=11),
    Question("Write an SQL query that counts all users.", 160, temperature=0.7, seed=5),
    Question("What is 12 + 30?", 90, temperature=1.0, seed=2**63),
)
END_S = 150.0  # what the last answers may take


@dataclass
class References:
    """What each question's answer is when nothing happens."""

    answers: dict[Question, dict[int, list[int]]] = field(default_factory=dict)

    @classmethod
    async def hear(cls, app: Application, questions: Sequence[Question] = QUESTIONS) -> "References":
        """Ask each alone."""
        async with HttpClient(app.url, KEYS[0]) as client:
            heard = [await client.whole(question) for question in questions]
        failed = [one.error for one in heard if one.error]
        if failed:
            raise RuntimeError(f"references could not be heard: {failed}")
        return cls({one.question: one.choices for one in heard})

    def num_lost(self, heard: Heard) -> int:
        """Tokens missing, doubled or others; of an answer that was broken off, among those that came."""
        is_part = bool(heard.error) or heard.was_left
        wanted = self.answers[heard.question]
        return sum(_num_other(heard.choices.get(index, []), ids, is_part) for index, ids in wanted.items())


def _num_other(ids: Sequence[int], wanted: Sequence[int], is_part: bool) -> int:
    """Tokens from the first difference on."""
    wanted = wanted[: len(ids)] if is_part else wanted
    pairs = enumerate(zip(ids, wanted, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(wanted)))
    return max(len(ids), len(wanted)) - first


class Traffic:
    """``async with Traffic(...)``: three clients over HTTP and one over gRPC ask until the block ends.

    Leaving it lets the answers under way come to their end.
    """

    def __init__(self, app: Application, references: References, *, num_http: int = 3, num_rpc: int = 1):
        self.heard: list[Heard] = []
        self._app, self._references = app, references
        self._counts = num_http, num_rpc
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Traffic":
        num_http, num_rpc = self._counts
        clients: list[Client] = [HttpClient(self._app.url, KEYS[0]) for _ in range(num_http)]
        clients += [RpcClient(self._app.rpc_address, KEYS[0]) for _ in range(num_rpc)]
        for number, client in enumerate(clients):
            await self._stack.enter_async_context(client)
            self._tasks.append(asyncio.create_task(self._ask(client, number)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_over.set()
        is_broken_off = exc[0] is not None
        _, late = await asyncio.wait(self._tasks, timeout=0 if is_broken_off else END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def flow(self, seconds: float) -> None:
        """Let traffic be for a while, every client at least at its second round."""
        await asyncio.sleep(seconds)
        until = time.monotonic() + 60
        while sum(len(heard.samples) > 2 for heard in self.running) < len(self._tasks):
            if time.monotonic() > until:
                raise TimeoutError("the clients' answers do not come")
            await asyncio.sleep(0.02)

    @property
    def running(self) -> list[Heard]:
        """Answers under way."""
        return [heard for heard in self.heard if not heard.ended]

    @property
    def num_lost(self) -> int:
        """Tokens of all answers that were lost, doubled or changed."""
        return sum(self._references.num_lost(heard) for heard in self.heard if heard.ended)

    @property
    def errors(self) -> list[str]:
        """Answers that ended by an error, or not at all."""
        return [heard.error or "no end" for heard in self.heard if heard.error or not heard.ended]

    def samples(self, since: float) -> list[Sample]:
        """Rounds that were heard of after a moment, in order."""
        return sorted((s for h in self.heard for s in h.samples if s.at > since), key=lambda s: s.at)

    def first_round(self, since: float, *, drafted: bool) -> float | None:
        """When the first round with drafts, or without, was heard of."""
        told = (s for s in self.samples(since) if s.is_inner and s.drafted is not None)
        return next((sample.at for sample in told if bool(sample.drafted) is drafted), None)

    async def await_round(self, since: float, *, drafted: bool, timeout_s: float) -> float | None:
        """Wait for such a round."""
        until = time.monotonic() + timeout_s
        while (at := self.first_round(since, drafted=drafted)) is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return at

    async def await_tokens(self, which: Sequence[Heard], since: float, timeout_s: float) -> float | None:
        """Wait until each of these answers went on, or ended; gives the time of the last to do so."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            times = [next((s.at for s in heard.samples if s.at > since), None) for heard in which]
            if all(at is not None or heard.ended for at, heard in zip(times, which, strict=True)):
                return max((at for at in times if at is not None), default=None)
            await asyncio.sleep(0.02)
        return None

    async def _ask(self, client: Client, number: int) -> None:
        questions = QUESTIONS[number % len(QUESTIONS) :] + QUESTIONS[: number % len(QUESTIONS)]
        async for question in in_turn(questions, self._is_over):
            heard = Heard(question)
            self.heard.append(heard)
            await client.stream(question, heard)
            if heard.error:
                await asyncio.sleep(0.2)
