"""The router's desk over a stage that is played in the same loop: queue, joins, moves and ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from deployments.burst import BurstWindow
from deployments.desk import Desk
from deployments.generation import (
    Delivery,
    Ended,
    Event,
    Generation,
    GenerationId,
    Started,
    TextTokens,
    Usage,
)
from deployments.lane import Lane
from deployments.lanes import Standing
from deployments.messages import (
    Admit,
    Answer,
    Closed,
    LastCall,
    Letter,
    Opened,
    Opening,
    Played,
    Refused,
    Retire,
)
from deployments.telemetry import Statistics
from deployments.ticket import MAX_FRUITLESS_MOVES, Ticket
from dflash_core.errors import DeadlineExceeded, InvalidRequest, QueueFull, RowFailed, Unavailable
from dflash_core.events import RoundReport, RowProgress, TokenLogprobs
from dflash_core.request import RowId, RowRequest, Sampling, WindowId
from dflash_core.text.stream import TextStream
from dflash_core.text.tokenizer import Tokenizer
from tests.deployments.fake_engine import PAIR, FakeWindow, script

TOKENIZER = Tokenizer.load(PAIR / "target")


class LocalStage:
    """Plays windows on the event loop itself; breaks off when told to."""

    pace_s = 0.001
    is_anywhere_open = True

    def __init__(self) -> None:
        self.lane = Lane(lambda window_id: FakeWindow(window_id, None, 64, 0.0), max_windows=2)
        self.openings: list[Opening] = []
        self.letters: list[Letter] = []
        self.early: dict[WindowId, list[Letter]] = {}
        self.breaks_after: list[int] = []  # for each opening, rounds until the replica "dies"
        self.refusals = 0
        self.max_rows: int | None = None

    async def play(self, opening: Opening) -> AsyncGenerator[Answer, None]:
        self.openings.append(opening)
        if self.refusals:
            self.refusals -= 1
            yield Refused("lane_full", "lane")
            return
        rounds_left = self.breaks_after.pop(0) if self.breaks_after else 1_000_000
        answers: list[Answer] = []
        self.lane.open(opening.window_id, opening.letters, answers.append)
        self.lane.apply(opening.window_id, self.early.pop(opening.window_id, []))
        try:
            yield Opened("lane", self.max_rows)
            while True:
                await asyncio.sleep(self.pace_s)
                self.lane.step()
                for answer in answers:
                    yield answer
                    if isinstance(answer, Closed):
                        return
                    rounds_left -= 1
                    if not rounds_left:
                        raise ConnectionError("replica died")
                answers.clear()
        finally:
            self.lane.close(opening.window_id)

    def send(self, window_id: WindowId, letter: Letter) -> None:
        self.letters.append(letter)
        if self.lane.is_open(window_id):
            self.lane.apply(window_id, (letter,))
        else:  # mail may come before its reader does
            self.early.setdefault(window_id, []).append(letter)

    def forget(self, window_id: WindowId) -> None:
        pass

    async def mend(self) -> None:
        pass


def desk(stage: LocalStage, statistics: Statistics | None = None, **options: float) -> Desk:
    new_text = lambda generation: TextStream(TOKENIZER, generation.stop_strings)  # noqa: E731
    counts = statistics or Statistics("demo", "0")
    return Desk(stage, counts, new_text, TOKENIZER.eos_token_ids, **options)  # type: ignore[arg-type]


def request(
    number: int,
    max_tokens: int = 10,
    stop: tuple[str, ...] = (),
    deadline_s: float = 10.0,
    client: str = "",
) -> Generation:
    name, prompt = GenerationId(f"g{number}"), (1, number)
    nothing: frozenset[int] = frozenset()
    return Generation(name, "demo", prompt, max_tokens, Sampling(), nothing, stop, deadline_s, client=client)


async def collect(desk: Desk, generation: Generation) -> list[Event]:
    return [event async for event in desk.play(generation)]


def tokens(events: Sequence[Event]) -> list[int]:
    return [t for e in events if isinstance(e, TextTokens) for t in e.token_ids]


def expected(generation: Generation) -> list[int]:
    return [script(generation.prompt_ids, 2 + i) for i in range(generation.max_tokens)]


async def test_a_request_starts_gives_its_tokens_and_ends() -> None:
    events = await collect(desk(LocalStage()), request(1))
    assert isinstance(events[0], Started)
    assert tokens(events) == expected(request(1))
    assert isinstance(events[-1], Ended)
    assert events[-1].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 10


async def test_times_to_the_first_token_and_between_outputs_are_observed() -> None:
    statistics = Statistics("demo", "0")
    d = desk(LocalStage(), statistics)
    await asyncio.gather(*[collect(d, request(i)) for i in range(3)])  # ten rounds of a token each
    histograms = statistics.snapshot().histograms
    first = histograms["vllm:time_to_first_token_seconds"][()]
    gaps = histograms["vllm:inter_token_latency_seconds"][()]
    assert (sum(first.counts), sum(gaps.counts)) == (3, 3 * 9)
    assert first.sum > 0
    assert gaps.sum > 0


async def test_a_first_token_without_a_round_is_no_round_in_the_usage() -> None:
    window = BurstWindow(
        WindowId("w"),
        LocalStage(),
        lambda window, opened: None,
        lambda window, played: None,
        lambda window, ending: None,
    )
    tickets = [
        Ticket(request(i), TextStream(TOKENIZER, ()), frozenset(), 0.0, Statistics("demo", "0"))
        for i in range(2)
    ]
    for ticket in tickets:
        window.join(ticket)
    rows = (
        RowProgress(RowId("g0"), (300, 301), 3, 1, 1),
        RowProgress(RowId("g1"), (302,), 0, 0, 0),  # its prompt was read in this step
    )
    window._take(Played(RoundReport(WindowId("w"), 1, 4, rows, 1, 0), 0))
    assert [ticket.usage().rounds for ticket in tickets] == [1, 0]
    assert [ticket.usage().completion_tokens for ticket in tickets] == [2, 1]


async def test_concurrent_requests_share_a_window() -> None:
    stage = LocalStage()
    d = desk(stage)
    await asyncio.gather(*[collect(d, request(i)) for i in range(6)])
    assert len(stage.openings) == 1


async def test_rows_beyond_the_window_wait_for_a_place() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=2)
    answers = await asyncio.gather(*[collect(d, request(i)) for i in range(6)])
    assert [tokens(a) for a in answers] == [expected(request(i)) for i in range(6)]
    assert len(stage.openings) == 1


async def test_a_full_queue_refuses_at_once() -> None:
    d = desk(LocalStage(), max_rows=1, max_queue=1)
    running = [asyncio.ensure_future(collect(d, request(i, 200))) for i in range(2)]
    await asyncio.sleep(0.02)
    with pytest.raises(QueueFull) as caught:
        await collect(d, request(9))
    assert caught.value.retry_after >= 1
    await asyncio.gather(*running)
    assert d.num_waiting == d.num_running == 0


async def test_a_client_that_fills_the_queue_makes_room_for_another() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=1, max_queue=4)
    first = [asyncio.ensure_future(collect(d, request(i, 100, client="many"))) for i in range(5)]
    await asyncio.sleep(0.01)
    assert (d.num_running, d.num_waiting) == (1, 4)
    with pytest.raises(QueueFull):
        await collect(d, request(9, client="many"))
    other = asyncio.ensure_future(collect(d, request(10, client="one")))
    await asyncio.sleep(0.01)
    for last in first[-2:]:
        with pytest.raises(QueueFull, match="others came") as caught:
            await last
        assert caught.value.retry_after >= 1
    other_place = asyncio.ensure_future(collect(d, request(11, client="one")))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="up to half"):
        await collect(d, request(12, client="many"))
    answers = [*await asyncio.gather(*first[:3]), await other, await other_place]
    assert [len(tokens(answer)) for answer in answers] == [100, 100, 100, 10, 10]
    rows = [row.row_id for row in admitted(stage)]
    assert rows.index(RowId("g10")) == 2  # after the one that ran, and one of the other client's


async def test_rows_wait_for_a_replica_as_long_as_their_deadline_lets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that no replica takes is nobody's fault: however often it fails, no row is given up."""
    monkeypatch.setattr("deployments.desk.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("deployments.desk.LONGEST_PAUSE_S", 0.01)
    stage = LocalStage()
    stage.breaks_after = [3]
    d = desk(stage, max_rows=2, max_queue=2)
    running = [asyncio.ensure_future(collect(d, request(i, 30))) for i in range(2)]
    await asyncio.sleep(0.003)
    real, stage.play = stage.play, _is_not_there  # type: ignore[method-assign]
    late = asyncio.ensure_future(collect(d, request(5, deadline_s=0.3)))
    while len(_attempts) <= MAX_FRUITLESS_MOVES + 1:
        await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded):
        await late
    stage.play = real  # type: ignore[method-assign]
    assert [tokens(answer) for answer in await asyncio.gather(*running)] == [
        expected(request(i, 30)) for i in range(2)
    ]


_attempts: list[Opening] = []


async def _is_not_there(opening: Opening) -> AsyncGenerator[Answer, None]:
    _attempts.append(opening)
    raise ConnectionError("no replica")
    yield Opened("lane")


async def test_a_broken_window_costs_no_token_and_none_twice() -> None:
    stage = LocalStage()
    stage.breaks_after = [3, 2]
    d = desk(stage)
    answers = await asyncio.gather(*[collect(d, request(i, 20)) for i in range(3)])
    assert [tokens(a) for a in answers] == [expected(request(i, 20)) for i in range(3)]
    assert sum(isinstance(e, Started) for e in answers[0]) == 3


async def test_a_row_that_breaks_every_window_ends_with_an_error() -> None:
    stage = LocalStage()
    d = desk(stage)
    stage.play = _dies_at_once  # type: ignore[method-assign]
    with pytest.raises(RowFailed):
        await collect(d, request(1))
    assert d.num_running == d.num_waiting == 0


async def _dies_at_once(opening: Opening) -> AsyncGenerator[Answer, None]:
    yield Opened("lane")
    raise ConnectionError("replica died")


async def test_refusals_are_tried_again_and_do_not_count_as_failures() -> None:
    stage = LocalStage()
    stage.refusals = 3
    assert tokens(await collect(desk(stage), request(1))) == expected(request(1))
    assert len(stage.openings) == 4


async def test_closing_the_generator_retires_the_row() -> None:
    stage = LocalStage()
    d = desk(stage)
    events = d.play(request(1, 5000))
    async for event in events:
        if isinstance(event, TextTokens):
            break
    await events.aclose()
    assert d.num_running == 0
    assert stage.lane.num_rows == 0


async def test_closing_a_waiting_request_frees_its_place_in_the_queue() -> None:
    d = desk(LocalStage(), max_rows=1, max_queue=1)
    running = asyncio.ensure_future(collect(d, request(1, 300)))
    waiting = asyncio.ensure_future(collect(d, request(2)))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.sleep(0.01)
    assert d.num_waiting == 0
    assert tokens(await running) == expected(request(1, 300))


@pytest.mark.parametrize("state", ["queued", "opening", "between windows", "playing", "held back"])
async def test_a_client_that_leaves_is_forgotten_in_every_state(state: str) -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=1)
    d.hear("targets", [Standing("lane")])
    held_back = TOKENIZER.decode([script((1, 2), 2 + i) for i in range(30)]) + "what does not follow"
    leaver = request(2, 5000, (held_back,) if state == "held back" else ())
    other = asyncio.ensure_future(collect(d, request(1, 300))) if state == "queued" else None
    await asyncio.sleep(0)
    if state == "between windows":
        stage.refusals = 1
    leaving = asyncio.ensure_future(collect(d, leaver))

    def is_there() -> bool:
        ticket = next((t for w in d._windows for t in w.tickets.values() if t.row_id == "g2"), None)
        match state:
            case "queued":
                return d.num_waiting == 1
            case "opening":
                return ticket is not None and not stage.lane.num_rows
            case "between windows":
                return d.num_waiting == 1 and any(lane.is_pausing for lane in d._board)
            case _:
                return ticket is not None and len(ticket.committed) > 2

    while not is_there():
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    await asyncio.sleep(0.01)
    assert (d.num_waiting, d.num_running, stage.lane.num_rows) == (0, int(other is not None), d.num_running)
    if other is not None:
        assert tokens(await other) == expected(request(1, 300))
    d.close()


async def test_a_reader_that_stalls_holds_nothing_up_and_has_its_whole_answer_kept() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=2)
    stalled = d.play(request(1, 40))
    first = await anext(stalled)
    answers = await asyncio.gather(*[collect(d, request(i, 60)) for i in range(2, 5)])
    assert [tokens(answer) for answer in answers] == [expected(request(i, 60)) for i in range(2, 5)]
    assert stage.lane.num_rows == d.num_running == 0
    rest = [first, *[event async for event in stalled]]
    assert tokens(rest) == expected(request(1, 40))
    assert len(rest) <= 40 + 2  # a round's event each at most: an answer bounds what is kept


async def test_a_deadline_ends_running_and_waiting_requests() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=1)
    late = [asyncio.ensure_future(collect(d, request(i, 100_000, deadline_s=0.1))) for i in range(2)]
    results = await asyncio.gather(*late, return_exceptions=True)
    assert all(isinstance(r, DeadlineExceeded) for r in results)
    assert stage.lane.num_rows == 0


async def test_a_stop_string_ends_the_row_before_its_budget() -> None:
    stage = LocalStage()
    d = desk(stage)
    whole = "".join(e.text for e in await collect(d, request(1, 30)) if isinstance(e, TextTokens))
    stop = whole[20:24]
    events = await collect(d, request(1, 30, (stop,)))
    end = events[-1]
    assert isinstance(end, Ended)
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)
    text = "".join(e.text for e in events if isinstance(e, TextTokens))
    assert text == whole[: whole.index(stop)]
    assert end.usage.completion_tokens == len(tokens(events)) < 30
    assert stage.lane.num_rows == 0


async def test_an_old_window_takes_no_joins_and_ends_with_its_last_row() -> None:
    stage = LocalStage()
    d = desk(stage, window_max_age_s=0.05)
    old = asyncio.ensure_future(collect(d, request(1, 300)))
    await asyncio.sleep(0.1)
    assert tokens(await collect(d, request(2))) == expected(request(2))
    assert len(stage.openings) == 2
    assert any(isinstance(letter.command, LastCall) for letter in stage.letters)
    assert tokens(await old) == expected(request(1, 300))
    await asyncio.sleep(0.1)
    assert d.num_windows == stage.lane.num_windows == 0


async def test_a_window_with_rows_goes_on_past_its_age_while_its_lane_takes_new_ones() -> None:
    stage = LocalStage()
    d = desk(stage, window_max_age_s=0.05)
    d.hear("targets", [Standing("lane")])
    old = asyncio.ensure_future(collect(d, request(1, 600)))
    await asyncio.sleep(0.12)
    assert tokens(await collect(d, request(2))) == expected(request(2))
    assert len(stage.openings) == 1
    d.hear("targets", [])  # it drains
    await asyncio.sleep(0.1)
    assert tokens(await collect(d, request(3))) == expected(request(3))
    assert len(stage.openings) == 2
    assert tokens(await old) == expected(request(1, 600))
    await asyncio.sleep(0.1)
    assert d.num_windows == stage.lane.num_windows == 0


async def test_rows_of_windows_that_run_out_hold_places_too() -> None:
    stage = LocalStage()
    d = desk(stage, window_max_age_s=0.02, max_rows=2, max_queue=8)
    playing = [asyncio.ensure_future(collect(d, request(n, 400))) for n in range(2)]
    await asyncio.sleep(0.05)  # their window takes no joins any more
    assert d.room == 0
    playing += [asyncio.ensure_future(collect(d, request(n, 40))) for n in range(2, 8)]
    most = 0
    while not all(task.done() for task in playing):
        await asyncio.sleep(0.005)
        most = max(most, stage.lane.num_rows)
    assert most == 2
    assert [tokens(task.result()) for task in playing] == [
        expected(request(n, 400 if n < 2 else 40)) for n in range(8)
    ]


async def test_a_row_that_fails_tells_its_own_client_alone() -> None:
    stage = LocalStage()
    d = desk(stage)
    other = asyncio.ensure_future(collect(d, request(2, 50)))
    failing = asyncio.ensure_future(collect(d, request(1, 5000)))
    await asyncio.sleep(0.02)
    ticket = next(t for w in d._windows for t in w.tickets.values() if t.row_id == "g1")
    ticket.take(RowProgress(ticket.row_id, (), 0, 0, 0, "error", "not finite", "row_failed"), 0.0)
    with pytest.raises(RowFailed, match="not finite"):
        await failing
    assert tokens(await other) == expected(request(2, 50))


async def test_a_draining_desk_refuses_what_is_new_and_ends_what_it_has() -> None:
    stage = LocalStage()
    d = desk(stage)
    running = asyncio.ensure_future(collect(d, request(1, 60)))
    await asyncio.sleep(0.02)
    assert d.drain() == 1
    assert d.is_draining
    with pytest.raises(Unavailable, match="shutting down"):
        await collect(d, request(2))
    assert tokens(await running) == expected(request(1, 60))
    assert d.drain() == 0


# Several choices of one request


def several(number: int, count: int, max_tokens: int = 10) -> Generation:
    generation = replace(request(number, max_tokens), num_choices=count)
    return replace(generation, sampling=Sampling(temperature=1.0, seed=7))


def admitted(stage: LocalStage) -> list[RowRequest]:
    letters = [letter for opening in stage.openings for letter in opening.letters] + stage.letters
    return [letter.command.request for letter in letters if isinstance(letter.command, Admit)]


async def test_choices_are_rows_of_one_window_with_seeds_of_their_own() -> None:
    stage = LocalStage()
    events = await collect(desk(stage), several(1, 3))
    for index in range(3):
        own = [e for e in events if isinstance(e, TextTokens | Ended) and e.index == index]
        assert tokens(own) == expected(request(1))
        assert isinstance(own[-1], Ended)
    assert sum(isinstance(event, Ended) for event in events) == 3
    assert len(stage.openings) == 1
    rows = admitted(stage)
    assert len({row.row_id for row in rows}) == 3
    assert [row.sampling.seed for row in rows] == [
        Sampling(seed=7).for_choice(index).seed for index in range(3)
    ]


async def test_choices_that_find_no_room_together_wait_their_turn() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=2, max_queue=8)
    events = await collect(d, several(1, 5))
    assert sum(isinstance(event, Ended) for event in events) == 5
    assert (d.num_running, d.num_waiting) == (0, 0)


async def test_the_queue_takes_all_choices_or_none() -> None:
    stage = LocalStage()
    d = desk(stage, max_rows=2, max_queue=2)
    running = asyncio.ensure_future(collect(d, request(1, 200)))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull):  # one place in the window, two in the queue
        await collect(d, several(2, 4))
    assert (d.num_running, d.num_waiting) == (1, 0)
    events = await collect(d, several(3, 3))
    assert sum(isinstance(event, Ended) for event in events) == 3
    await running


async def test_a_client_that_leaves_takes_all_its_choices_away() -> None:
    stage = LocalStage()
    d = desk(stage)
    playing = d.play(several(1, 3, 400))
    async for event in playing:
        if isinstance(event, TextTokens):
            break
    await playing.aclose()
    assert (d.num_running, d.num_waiting) == (0, 0)
    retired = [letter.command.row_id for letter in stage.letters if isinstance(letter.command, Retire)]
    assert len(retired) == 3


async def test_each_choice_that_stops_is_counted() -> None:
    stage = LocalStage()
    statistics = Statistics("demo", "0")
    d = desk(stage, statistics)
    stop = TOKENIZER.decode([script((1, 1), 4)])  # what the third token says; the rows speak alike
    generation = replace(several(1, 2), stop_strings=(stop,))
    events = await collect(d, generation)
    assert [e.finish_reason for e in events if isinstance(e, Ended)] == ["stop", "stop"]
    assert statistics.snapshot().values["vllm:request_success_total"][("stop",)] == 2


async def test_choices_that_break_off_move_together_and_a_deadline_ends_them_all() -> None:
    stage = LocalStage()
    stage.breaks_after = [3]
    events = await collect(desk(stage), several(1, 2))
    for index in range(2):
        own = [e for e in events if isinstance(e, TextTokens | Ended) and e.index == index]
        assert tokens(own) == expected(request(1))
    d = desk(stage)
    late = replace(several(2, 2, 100_000), deadline_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await collect(d, late)
    assert (d.num_running, d.num_waiting) == (0, 0)


# What rides with the tokens


def numbered(tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(token)) for token in tokens)


def drained(ticket: Ticket) -> list[Event | Exception]:
    return [ticket.events.get_nowait() for _ in range(ticket.events.qsize())]


def ticket_of(generation: Generation) -> Ticket:
    text = TextStream(TOKENIZER, generation.stop_strings)
    return Ticket(generation, text, frozenset(), 0.0, Statistics("demo", "0"))


async def test_a_stop_string_cuts_the_numbers_with_the_tokens() -> None:
    ids = tuple(script((1, 1), position) for position in range(2, 6))
    stop = TOKENIZER.decode([ids[1]])
    ticket = ticket_of(replace(request(1, stop=(stop,)), num_top_logprobs=0))
    ticket.take(RowProgress(ticket.row_id, ids, 3, 3, 3, logprobs=numbered(ids)), 0.0)
    told = drained(ticket)[0]
    assert isinstance(told, TextTokens)
    assert told.token_ids == ids[:2]
    assert told.logprobs == numbered(ids[:2])


async def test_a_stop_string_cuts_what_is_counted_as_accepted() -> None:
    ids = tuple(script((1, 1), position) for position in range(2, 18))
    stop = TOKENIZER.decode([ids[2]])
    ticket = ticket_of(replace(request(1, 30, (stop,)), delivery=Delivery(rounds=True)))
    ticket.take(RowProgress(ticket.row_id, ids, 15, 15, 15, num_first=1), 0.0, width=16)
    told, ended = drained(ticket)
    assert isinstance(told, TextTokens)
    assert isinstance(ended, Ended)
    assert ended.usage == Usage(2, completion_tokens=3, rounds=1, drafted=15, walked=15, accepted=2)
    assert told.round is not None
    assert (told.round.accepted, told.round.walked) == (2, 15)
    assert ticket.statistics.snapshot().values["vllm:generation_tokens_total"][()] == 3


async def test_the_prompts_numbers_are_asked_for_once_however_often_a_row_moves() -> None:
    ticket = ticket_of(replace(request(1), num_top_logprobs=1, echo="a"))
    asked = ticket.row_request()
    assert (asked.num_top_logprobs, asked.wants_prompt_logprobs) == (1, True)
    prompt = numbered((1,))
    ticket.take(
        RowProgress(ticket.row_id, (300,), 0, 0, 0, logprobs=numbered((300,)), prompt_logprobs=prompt), 0.0
    )
    told = drained(ticket)[0]
    assert isinstance(told, TextTokens)
    assert told.prompt_logprobs == prompt
    again = ticket.row_request()
    assert (again.num_top_logprobs, again.wants_prompt_logprobs) == (1, False)


async def test_a_request_for_the_prompt_alone_ends_without_a_token() -> None:
    generation = replace(request(1, max_tokens=0), num_top_logprobs=0, echo="a")
    ticket = ticket_of(generation)
    assert ticket.row_request().max_tokens == 1
    prompt = numbered((1,))
    first = RowProgress(
        ticket.row_id, (300,), 0, 0, 0, "length", logprobs=numbered((300,)), prompt_logprobs=prompt
    )
    ticket.take(first, 0.0, width=0)
    told, ended = drained(ticket)
    assert isinstance(told, TextTokens)
    assert (told.token_ids, told.prompt_logprobs) == ((), prompt)
    assert isinstance(ended, Ended)
    assert ended.usage.completion_tokens == 0


async def test_more_choices_than_there_is_room_for_are_refused_for_good() -> None:
    d = desk(LocalStage(), max_rows=2, max_queue=1)
    with pytest.raises(InvalidRequest, match="at most 3 choices") as caught:
        await collect(d, replace(request(1), num_choices=4))
    assert caught.value.param == "n"


async def test_a_replica_that_plays_fewer_rows_than_the_settings_say_is_given_no_more() -> None:
    stage = LocalStage()
    stage.max_rows = 2
    d = desk(stage, max_rows=4)
    first = asyncio.ensure_future(collect(d, request(1, 60)))
    await asyncio.sleep(0.02)
    others = [asyncio.ensure_future(collect(d, request(number, 60))) for number in (2, 3, 4)]
    await asyncio.sleep(0.02)
    assert (d.num_running, d.num_waiting) == (2, 2)
    for number, answer in enumerate([first, *others], start=1):
        assert tokens(await answer) == expected(request(number, 60))
