"""Any interleaving of requests, rounds, leavers, refusals, faults and lost replicas, as one state machine.

Whatever happens, each choice ends exactly once, what it was given is a prefix of its own answer that only
grows, no more rows play than there are slots, and nothing is left when all have ended. Places go round robin:
while a client waits, every other one gets at most one place before it, and none has more than half the queue.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.desk import Desk
from deployments.exchange.patience import Patience
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.transport import Transport
from deployments.fair_queue import FairQueue
from deployments.generation import Ended, Generation, TextTokens
from deployments.lane import Lane
from deployments.lanes import Standing
from deployments.messages import Answer, Closed, Opening, Played
from deployments.ticket import MAX_FRUITLESS_MOVES, SUSPICIOUS_MOVES, Ticket
from dflash_core.errors import DeadlineExceeded, DFlashError, QueueFull, RowFailed, Unavailable
from dflash_core.request import RowId
from tests.deployments.fake_engine import BLOCK, FAULT, FakeWindow
from tests.deployments.local_link import LocalLink
from tests.deployments.test_desk import LocalStage, desk, expected, request
from tests.deployments.turning_loop import TurningLoop
from tests.deployments.virtual_time import VirtualTimeLoop

MAX_ROWS, MAX_QUEUE = 3, 4
SHARE = MAX_QUEUE // 2
NAMES = ("alice", "bob", "carol")
PING_S = 0.1  # until a drafter that is back has been asked

Kind = Literal["ordinary", "fails", "breaks its window", "is late"]


class LossyStage(LocalStage):
    """Its target dies when told to, without a word; while it is away calls wait for it."""

    def __init__(self, drafter: RemoteDrafter) -> None:
        super().__init__()
        self.lane = Lane(lambda window_id: FakeWindow(window_id, drafter, 64, 0.0), max_windows=2)
        self.losses = 0
        self.poison: set[RowId] = set()  # rows that break every window that plays them
        self.is_there = asyncio.Event()
        self.is_there.set()

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        await self.is_there.wait()
        before = self.losses
        async with aclosing(super().play(opening)) as answers:
            async for answer in answers:
                if self.losses > before:
                    raise ConnectionError("replica died")
                if isinstance(answer, Played) and self._is_poisoned(answer):
                    yield Closed("failed", "a processor raised")
                    return
                yield answer

    def _is_poisoned(self, played: Played) -> bool:
        return any(row.row_id in self.poison for row in played.report.rows)


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
        moved = [ticket for ticket in self._moved if may(ticket)]  # a suspect waits until it may play alone
        ticket = super().pop(may)
        if ticket is None:
            if moved or first:
                self.faults.append("nobody was given a place")
            return None
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

    def greedy(self) -> list[str]:
        """Clients that hold more than half beside others, though their last request could be refused."""
        held = Counter(ticket.generation.client for ticket in self)
        if len(held) < 2:
            return []
        last = {client: tickets[-1].generation for client, tickets in self._clients.items()}
        whole = {
            client: sum(t.generation is generation for t in self._clients[client]) == generation.num_choices
            for client, generation in last.items()
        }
        return [client for client, is_whole in whole.items() if is_whole and held[client] > SHARE]

    def _forget(self, client: str) -> None:
        """Its turn has come, or nothing of it waits."""
        self.passed[client] = Counter()


@dataclass
class Client:
    """One request as its client sees it."""

    generation: Generation
    kind: Kind
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    ended: set[int] = field(default_factory=set)
    error: DFlashError | None = None
    has_left: bool = False
    task: "asyncio.Task[None] | None" = None

    async def read(self, desk: Desk) -> None:
        try:
            async for event in desk.play(self.generation):
                if isinstance(event, TextTokens | Ended):
                    assert event.index not in self.ended, "an event after the end"
                if isinstance(event, TextTokens):
                    self.tokens.setdefault(event.index, []).extend(event.token_ids)
                if isinstance(event, Ended):
                    self.ended.add(event.index)
        except DFlashError as error:
            self.error = error


class DeskMachine(RuleBasedStateMachine):
    """The desk between its clients and a stage that fails as Hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch("deployments.desk.FIRST_PAUSE_S", 0.001)
        self.patch.start()
        self.loop = VirtualTimeLoop()  # by the machine's clock, one sequence would not play the same twice
        self.links_loop = TurningLoop()
        self.link = LocalLink()
        patience = Patience(30.0, floor_s=30.0)
        self.drafter = RemoteDrafter(self.link, self.links_loop, Transport("value"), "fake", BLOCK, patience)
        self.stage = LossyStage(self.drafter)
        self.desk = desk(self.stage, max_rows=MAX_ROWS, max_queue=MAX_QUEUE)
        self.queue = self.desk._waiting = WatchedQueue(MAX_QUEUE)
        self.clients: list[Client] = []
        self.numbers = itertools.count(1)

    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def tell(self, *standings: Standing) -> None:
        async def work() -> None:
            self.desk.hear("targets", standings)

        self.loop.run_until_complete(work())

    @property
    def reading(self) -> list[Client]:
        return [c for c in self.clients if c.task is not None and not c.task.done()]

    @rule(
        max_tokens=st.integers(1, 40),
        name=st.sampled_from(NAMES),
        count=st.sampled_from((1, 1, 2)),
        kind=st.sampled_from(("ordinary", "ordinary", "ordinary", "fails", "breaks its window", "is late")),
    )
    def ask(self, max_tokens: int, name: str, count: int, kind: Kind) -> None:
        client = self.new_client(max_tokens, name, count, kind)
        held = Counter(ticket.generation.client for ticket in self.queue)
        num_queued, surplus = self.desk._num_queued(), len(self.queue.surplus(name))
        client.task = self.loop.create_task(client.read(self.desk))
        self.clients.append(client)
        self.pass_time(0)
        if isinstance(client.error, QueueFull):
            has_half = held.total() > held[name] and held[name] + count > SHARE
            assert has_half or num_queued + count > MAX_QUEUE, "refused while there was room"
            assert has_half or surplus < count, "refused while others held more than their share"

    @rule(number=st.integers(2, MAX_ROWS + MAX_QUEUE), name=st.sampled_from(NAMES))
    def ask_for_much(self, number: int, name: str) -> None:
        for _ in range(number):
            self.ask(40, name, 1, "ordinary")

    def new_client(self, max_tokens: int, name: str, count: int, kind: Kind) -> Client:
        asked = request(next(self.numbers), max_tokens, client=name)
        deadline_s = 0.005 if kind == "is late" else asked.deadline_s
        prompt_ids = (FAULT if kind == "fails" else 1, asked.prompt_ids[-1])
        if kind == "breaks its window":
            self.stage.poison |= {asked.row_id(index) for index in range(count)}
        return Client(replace(asked, prompt_ids=prompt_ids, num_choices=count, deadline_s=deadline_s), kind)

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

    @rule(is_told=st.booleans())
    def lose_the_target_for_long(self, is_told: bool) -> None:
        self.stage.is_there.clear()
        self.lose_the_target()
        if is_told:
            self.tell()

    @rule(is_told=st.booleans())
    def have_the_target_back(self, is_told: bool) -> None:
        self.stage.is_there.set()
        if is_told:
            self.tell(Standing("lane"))
        self.pass_time(0.002)

    @rule(times=st.integers(1, 3))
    def be_refused(self, times: int) -> None:
        self.stage.refusals = times

    @rule()
    def lose_the_drafter(self) -> None:
        self.link.is_dead = True

    @rule()
    def have_another_drafter(self) -> None:
        self.link.restart()
        self.links_loop.pass_time(PING_S)

    @invariant()
    def what_a_client_has_is_a_prefix_of_its_answer(self) -> None:
        for client in self.clients:
            for tokens in client.tokens.values():
                assert tokens == expected(client.generation)[: len(tokens)]

    @invariant()
    def places_go_round_robin(self) -> None:
        assert not self.queue.faults

    @invariant()
    def nobody_has_more_than_half_of_the_queue_beside_others(self) -> None:
        assert self.desk._board.is_silent or not self.queue.greedy()

    @invariant()
    def no_more_rows_play_than_there_are_slots(self) -> None:
        assert self.stage.lane.num_rows <= MAX_ROWS
        assert self.desk.num_waiting <= MAX_QUEUE + MAX_ROWS  # rows that moved come back to the queue
        assert self.desk.num_running <= MAX_ROWS

    def teardown(self) -> None:
        try:
            self.stage.is_there.set()
            tasks = [c.task for c in self.clients if c.task is not None]
            assert self.desk.drain() == sum(len(self.playing(client)) for client in self.reading)
            if tasks:
                self.loop.run_until_complete(asyncio.wait_for(asyncio.wait(tasks), 20))
            with pytest.raises(Unavailable, match="shutting down"):
                self.loop.run_until_complete(anext(self.desk.play(request(0))))
            self.pass_time(0.01)
            for client in self.clients:
                self.check_end(client)
            assert (self.desk.num_running, self.desk.num_waiting) == (0, 0)
            assert self.stage.lane.num_rows == 0
        finally:
            self.desk.close()
            self.pass_time(0.01)
            self.link.is_dead = False
            self.links_loop.pass_time(PING_S)
            self.loop.close()
            self.links_loop.close()
            self.patch.stop()
        assert not self.drafter._windows
        assert self.link.sessions.num_sessions == 0

    def playing(self, client: Client) -> set[int]:
        return set(range(client.generation.num_choices)) - client.ended

    def check_end(self, client: Client) -> None:
        if client.has_left:
            return
        if client.error is None:
            assert client.kind != "breaks its window"
            assert client.ended == set(range(client.generation.num_choices))
            assert all(tokens == expected(client.generation) for tokens in client.tokens.values())
        elif isinstance(client.error, RowFailed):
            # A row that breaks windows counts against another until they are parted.
            is_its_own = client.kind in ("fails", "breaks its window")
            assert is_its_own or self.stage.losses + SUSPICIOUS_MOVES > MAX_FRUITLESS_MOVES
        elif isinstance(client.error, DeadlineExceeded):
            assert client.kind == "is late"
        else:
            assert isinstance(client.error, QueueFull), client.error
            assert client.generation.num_choices > 1 or not client.tokens  # whoever had a place keeps it


DeskMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestDesk = DeskMachine.TestCase
