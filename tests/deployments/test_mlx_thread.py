"""The one thread that computes: order, work between calls, sleep, and death that is noticed."""

import asyncio
import threading
import time

import pytest

from deployments.mlx_thread import MlxThread


def test_calls_run_in_order_on_one_thread() -> None:
    thread = MlxThread("t")
    seen: list[tuple[int, int]] = []
    for i in range(20):
        thread.submit(lambda i=i: seen.append((i, threading.get_ident())))
    thread.submit(lambda: None).result(5)
    assert [i for i, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    thread.stop()


def test_work_goes_on_between_calls_until_there_is_none() -> None:
    steps: list[int] = []

    def work() -> bool:
        steps.append(1)
        return len(steps) < 5

    thread = MlxThread("t", work)
    assert thread.submit(lambda: "answer").result(5) == "answer"
    assert steps == []  # nobody has said that there is work
    thread.wake()
    time.sleep(0.1)
    assert len(steps) == 5
    thread.stop()


def test_a_call_that_raises_fails_alone() -> None:
    thread = MlxThread("t")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(5)
    assert thread.submit(lambda: 2).result(5) == 2
    thread.check()
    thread.stop()


def test_work_that_raises_ends_the_thread_and_check_says_so() -> None:
    def work() -> bool:
        raise ValueError("broken")

    thread = MlxThread("t", work)
    thread.wake()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="died"):
        thread.check()
    with pytest.raises(RuntimeError, match="ended"):
        thread.submit(lambda: None)


async def test_the_event_loop_stays_free_while_a_call_runs() -> None:
    thread = MlxThread("t")
    running = asyncio.ensure_future(thread.run(lambda: time.sleep(0.2)))
    ticks = 0
    while not running.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 5
    thread.stop()


def test_stop_cancels_what_still_waits() -> None:
    thread = MlxThread("t")
    thread.submit(lambda: time.sleep(0.1))
    waiting = thread.submit(lambda: None)
    thread.stop()
    assert waiting.cancelled()
