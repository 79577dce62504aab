"""Who gets the next place, and who must go when another client comes."""

from dataclasses import replace

from deployments.fair_queue import FairQueue
from deployments.telemetry import Statistics
from deployments.ticket import Ticket
from dflash_core.text.stream import TextStream
from tests.deployments.test_desk import TOKENIZER, request

STATISTICS = Statistics("demo", "0")


def ticket(client: str, number: int, choices: int = 1, index: int = 0) -> Ticket:
    generation = replace(request(number, client=client), num_choices=choices)
    return Ticket(generation, TextStream(TOKENIZER, ()), frozenset(), 0.0, STATISTICS, index)


def choices(client: str, number: int, count: int) -> list[Ticket]:
    first = ticket(client, number, count)
    others = [replace(first, index=index) for index in range(1, count)]
    return [first, *others]


def queue(*tickets: Ticket, max_waiting: int = 8) -> FairQueue:
    waiting = FairQueue(max_waiting)
    waiting.extend(tickets)
    return waiting


def order(waiting: FairQueue) -> list[str]:
    return [popped(waiting) for _ in range(len(waiting))]


def popped(waiting: FairQueue) -> str:
    ticket = waiting.pop()
    assert ticket is not None
    return ticket.row_id


def test_places_go_round_robin_over_clients_and_in_order_inside_one() -> None:
    many = [ticket("many", number) for number in (1, 2, 3)]
    assert order(queue(*many, ticket("one", 4), ticket("two", 5))) == ["g1", "g4", "g5", "g2", "g3"]


def test_whoever_may_not_have_the_place_is_passed_over_and_keeps_its_turn() -> None:
    moved, first, second, other = ticket("c", 1), ticket("a", 2), ticket("a", 3), ticket("b", 4)
    waiting = queue(first, second, other)
    waiting.put_back([moved])
    assert waiting.pop(lambda t: t not in (moved, first)) is second
    assert waiting.pop(lambda t: False) is None
    assert order(waiting) == ["g1", "g4", "g2"]


def test_a_client_that_had_a_place_comes_behind_those_that_had_none() -> None:
    waiting = queue(ticket("a", 1), ticket("a", 2), ticket("b", 3))
    assert popped(waiting) == "g1"
    waiting.extend([ticket("c", 4), ticket("a", 5)])
    assert order(waiting) == ["g3", "g2", "g4", "g5"]


def test_rows_that_lost_their_place_come_first_whoever_owns_them() -> None:
    waiting = queue(ticket("b", 3))
    waiting.put_back([ticket("a", 1), ticket("a", 2)])
    assert [t.row_id for t in waiting] == order(waiting) == ["g1", "g2", "g3"]


def test_a_client_alone_may_fill_the_queue_and_beside_others_half_of_it() -> None:
    waiting = queue(*[ticket("a", number) for number in range(4)])
    assert waiting.may_take("a", 100)
    waiting.extend([ticket("b", 9)])
    assert not waiting.may_take("a", 1)
    assert waiting.may_take("b", 3)
    assert not waiting.may_take("b", 4)


def test_rows_that_lost_their_place_count_as_their_clients() -> None:
    waiting = queue(ticket("b", 9))
    waiting.put_back([ticket("a", number) for number in range(4)])
    assert waiting.num_of("a") == 4
    assert not waiting.may_take("a", 1)


def surplus(waiting: FairQueue, newcomer: str | None = None) -> list[str]:
    return [t.row_id for t in waiting.surplus(newcomer)]


def test_what_is_beyond_half_goes_from_its_clients_end_as_soon_as_another_waits() -> None:
    waiting = queue(*[ticket("a", number) for number in range(6)])
    assert surplus(waiting) == []
    assert surplus(waiting, "b") == ["g5", "g4"]
    waiting.extend([ticket("b", 10)])
    assert surplus(waiting) == ["g5", "g4"]


def test_nobody_gives_way_who_holds_no_more_than_half() -> None:
    waiting = queue(*[ticket("a", number) for number in range(4)], *[ticket("b", 9)])
    assert surplus(waiting) == surplus(waiting, "c") == []
    waiting.extend([ticket("a", 5)])
    assert surplus(waiting, "a") == []  # nor does a client for itself
    assert surplus(waiting) == ["g5"]


def test_rows_that_lost_their_place_give_way_to_nobody_and_are_company() -> None:
    waiting = queue()
    waiting.put_back([ticket("a", number) for number in range(8)])
    assert surplus(waiting, "b") == []
    waiting.extend([ticket("a", 8), *[ticket("b", number) for number in range(10, 15)]])
    assert surplus(waiting) == ["g8", "g14"]


def test_choices_go_together_or_not_at_all() -> None:
    several = choices("a", 1, 6)
    assert list(queue(*several).surplus("b")) == several
    waiting = queue(*several)
    waiting.pop()  # the others have been asked for with it, and one of them plays
    assert not waiting.surplus("b")


def test_who_waits_no_longer_is_forgotten() -> None:
    one, two = ticket("a", 1), ticket("a", 2)
    waiting = queue(one, two)
    for gone in (one, two, two):
        waiting.remove(gone)
    assert (len(waiting), waiting.num_of("a"), list(waiting)) == (0, 0, [])
    assert waiting.may_take("b", 100)
