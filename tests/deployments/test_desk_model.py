"""Any interleaving of requests, rounds, leavers, refusals and lost targets, as one state machine.

Whatever happens, each request ends exactly once, what it was given is a prefix of its own answer that only
grows, no more rows play than there are slots, and nothing is left when all have ended. Places go round robin:
while a client waits, every other one gets at most one place before it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.desk import Desk
from deployments.fair_queue import FairQueue
from deployments.generation import Ended, Generation, TextTokens
from deployments.messages import Answer, Opening
from deployments.ticket import MAX_FRUITLESS_MOVES, Ticket
from dflash_core.errors import DFlashError, QueueFull, RowFailed
from tests.deployments.test_desk import LocalStage, desk, expected, request
from tests.deployments.virtual_time import VirtualTimeLoop

MAX_ROWS, MAX_QUEUE = 3, 4
NAMES = ("alice", "bob", "carol")


class LossyStage(LocalStage):
    """Every window open dies when told to, without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        before = self.losses
        async for answer in super().play(opening):
            if self.losses > before:
                raise ConnectionError("replica died")
            yield answer


class WatchedQueue(FairQueue):
    """Notes who is passed over, and how often; the desk's own tasks would swallow an assertion."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(max_waiting)
        self.passed: dict[str, Counter[str]] = {}  # by waiting client: places that others got meanwhile
        self.faults: list[str] = []

    def extend(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self.passed.setdefault(ticket.generation.client, Counter())
            super().extend([ticket])

    def pop(self, may: Callable[[Ticket], bool] = lambda ticket: True) -> Ticket | None:
        first = {client: tickets[0] for client, tickets in self._clients.items()}
        moved = list(self._moved)
        ticket = super().pop(may)
        assert ticket is not None  # lanes here take everybody
        client = ticket.generation.client
        if moved:
            if ticket is not moved[0]:
                self.faults.append(f"{ticket.row_id} went before rows that had lost their place")
            return ticket
        if ticket is not first[client]:
            self.faults.append(f"{ticket.row_id} went before {first[client].row_id}")
        for other in first.keys() - {client}:
            self.passed[other][client] += 1
            if self.passed[other][client] > 1:
                self.faults.append(f"{other} waits while {client} gets {self.passed[other]}")
        self._forget(client)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        super().remove(ticket)
        if ticket.generation.client not in self._clients:
            self._forget(ticket.generation.client)

    def _forget(self, client: str) -> None:
        """Its turn has come, or nothing of it waits."""
        self.passed[client] = Counter()


@dataclass
class Client:
    """One request as its client sees it."""

    generation: Generation
    tokens: list[int] = field(default_factory=list)
    ends: int = 0
    error: DFlashError | None = None
    has_left: bool = False
    task: "asyncio.Task[None] | None" = None

    async def read(self, desk: Desk) -> None:
        try:
            async for event in desk.play(self.generation):
                assert not self.ends, "an event after the end"
                if isinstance(event, TextTokens):
                    self.tokens.extend(event.token_ids)
                self.ends += isinstance(event, Ended)
        except DFlashError as error:
            self.error = error


class DeskMachine(RuleBasedStateMachine):
    """The desk between its clients and a stage that fails as Hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch("deployments.desk.FIRST_PAUSE_S", 0.001)
        self.patch.start()
        self.loop = VirtualTimeLoop()  # by the machine's clock, one sequence would not play the same twice
        self.stage = LossyStage()
        self.desk = desk(self.stage, max_rows=MAX_ROWS, max_queue=MAX_QUEUE)
        self.queue = self.desk._waiting = WatchedQueue(MAX_QUEUE)
        self.clients: list[Client] = []
        self.numbers = itertools.count(1)

    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @property
    def reading(self) -> list[Client]:
        return [c for c in self.clients if c.task is not None and not c.task.done()]

    @rule(max_tokens=st.integers(1, 40), name=st.sampled_from(NAMES))
    def ask(self, max_tokens: int, name: str) -> None:
        client = Client(request(next(self.numbers), max_tokens, client=name))
        held = Counter(ticket.generation.client for ticket in self.queue)
        untouched = Counter(t.generation.client for t in self.queue if not t.was_admitted)
        client.task = self.loop.create_task(client.read(self.desk))
        self.clients.append(client)
        self.pass_time(0)
        if isinstance(client.error, QueueFull):
            has_half = held[name] >= MAX_QUEUE // 2
            others_hold_more = any(
                held[other] > MAX_QUEUE // 2 and untouched[other] for other in held.keys() - {name}
            )
            assert has_half or not others_hold_more, "refused for others' sake"
            assert held.total() >= MAX_QUEUE or (has_half and held.total() > held[name])

    @rule(rounds=st.integers(1, 12))
    def play(self, rounds: int) -> None:
        self.pass_time(0.0012 * rounds)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.reading))
        client.has_left = True
        assert client.task is not None
        client.task.cancel()
        self.pass_time(0.003)
        assert client.task.done()

    @rule()
    def lose_the_target(self) -> None:
        self.stage.losses += 1
        self.pass_time(0.002)

    @rule(times=st.integers(1, 3))
    def be_refused(self, times: int) -> None:
        self.stage.refusals = times

    @invariant()
    def what_a_client_has_is_a_prefix_of_its_answer(self) -> None:
        for client in self.clients:
            assert client.tokens == expected(client.generation)[: len(client.tokens)]
            assert client.ends <= 1

    @invariant()
    def places_go_round_robin(self) -> None:
        assert not self.queue.faults

    @invariant()
    def no_more_rows_play_than_there_are_slots(self) -> None:
        assert self.desk.num_waiting <= MAX_QUEUE + MAX_ROWS  # rows that moved come back to the queue
        assert self.desk.num_running <= MAX_ROWS * max(1, self.desk.num_windows)

    def teardown(self) -> None:
        try:
            tasks = [c.task for c in self.clients if c.task is not None]
            if tasks:
                self.loop.run_until_complete(asyncio.wait_for(asyncio.wait(tasks), 20))
            self.pass_time(0.01)
            for client in self.clients:
                self.check_end(client)
            assert (self.desk.num_running, self.desk.num_waiting) == (0, 0)
            assert self.stage.lane.num_rows == 0
        finally:
            self.desk.close()
            self.pass_time(0.01)
            self.loop.close()
            self.patch.stop()

    def check_end(self, client: Client) -> None:
        if client.has_left:
            return
        if client.error is None:
            assert client.tokens == expected(client.generation)
            assert client.ends == 1
        elif isinstance(client.error, RowFailed):
            assert self.stage.losses > MAX_FRUITLESS_MOVES
        else:
            assert isinstance(client.error, QueueFull), client.error
            assert not client.tokens  # whoever had a place keeps it


DeskMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestDesk = DeskMachine.TestCase
