"""Events that strike processes: drafters, targets and the router, killed or hung under traffic."""

import asyncio
import time

from deployments.openai.limits import Limits
from tests.faults.application import KEYS, Application, kill, stopped
from tests.faults.report import Row
from tests.faults.streams import HttpClient
from tests.faults.traffic import QUESTIONS, References, Traffic

WHOLE_S = 120.0  # what replicas may take to be replaced, on a machine that does other things as well
DETECTED_S = 1.5  # a round without drafts is heard of, a row is placed elsewhere
HANG_S = 3.0


def _close(row: Row, traffic: Traffic) -> Row:
    """What every event that clients must not notice promises."""
    row.num_lost, row.num_errors = traffic.num_lost, len(traffic.errors)
    row.require(row.num_lost == 0, "a token was lost")
    row.require(not traffic.errors, f"streams had errors: {sorted(set(traffic.errors))}")
    row.require(len(traffic.heard) > 0, "nobody asked")
    return row


async def nothing(app: Application, references: References) -> Row:
    """The control: undisturbed traffic loses nothing, and every round drafts."""
    row = Row("nothing (control)")
    async with Traffic(app, references) as traffic:
        await traffic.flow(6.0)
        row.require(traffic.first_round(0.0, drafted=True) is not None, "no round drafted")
        _count_classic(row, traffic, 0.0)
    return _close(row, traffic)


async def drafter_dies(app: Application, references: References) -> Row:
    """The one that holds the window: the ring names the other, which is given the rows' features."""
    row = Row("drafter killed, one is left")
    async with Traffic(app, references) as traffic:
        await traffic.flow(3.0)
        name = await asyncio.to_thread(app.busy_drafter)
        struck = kill(app.replicas("Drafter")[name])
        await _speculation(row, traffic, struck, struck, 10.0)
    await asyncio.to_thread(app.await_whole, WHOLE_S)
    return _close(row, traffic)


async def drafters_die(app: Application, references: References) -> Row:
    """All of them: rows go on at width 1 until a replacement is ready."""
    row = Row("all drafters killed")
    async with Traffic(app, references) as traffic:
        await traffic.flow(3.0)
        pids = list(app.replicas("Drafter").values())
        struck = kill(*pids)
        ready = asyncio.create_task(asyncio.to_thread(_await_drafter, app, set(pids)))
        await _speculation(row, traffic, struck, struck, WHOLE_S)
        row.notes.append(f"a replacement was ready after {await ready - struck:.1f} s")
        _count_classic(row, traffic, struck)
    await asyncio.to_thread(app.await_whole, WHOLE_S)
    return _close(row, traffic)


async def drafter_hangs(app: Application, references: References) -> Row:
    """A process that does not run for a while: a stall, not a death."""
    row = Row(f"drafter hangs for {HANG_S:g} s")
    async with Traffic(app, references) as traffic:
        await traffic.flow(4.0)  # rounds enough that the median is known
        name = await asyncio.to_thread(app.busy_drafter)
        with stopped(app.replicas("Drafter")[name]) as struck:
            await asyncio.sleep(HANG_S)
        woken = time.monotonic()
        await _speculation(row, traffic, struck, woken, 10.0)
        _count_classic(row, traffic, struck)
    return _close(row, traffic)


async def target_dies(app: Application, references: References) -> Row:
    """Rows are read again elsewhere, prompt and what was committed, and go on at the next token."""
    row = Row("target killed, one is left")
    async with Traffic(app, references) as traffic:
        await traffic.flow(3.0)
        # The lane of a stream that tells where it plays.
        lane = next(heard.places[-1][1] for heard in traffic.running if heard.places)
        moved = traffic.running
        struck = kill(app.replicas("Target")[lane])
        await _recovery(row, traffic, struck, moved, 30.0)
        row.require_within(row.detection_s, DETECTED_S, "placed elsewhere")
    await asyncio.to_thread(app.await_whole, WHOLE_S)
    return _close(row, traffic)


async def targets_die(app: Application, references: References) -> Row:
    """Nobody is left: rows wait for a replacement, and so does who comes meanwhile, behind them."""
    row = Row("all targets killed")
    async with Traffic(app, references) as traffic, HttpClient(app.url, KEYS[1]) as late:
        await traffic.flow(3.0)
        moved = traffic.running
        struck = kill(*app.replicas("Target").values())
        newcomer = asyncio.create_task(late.whole(QUESTIONS[0]))
        await _recovery(row, traffic, struck, moved, WHOLE_S)
        meanwhile = await newcomer
        is_whole = not meanwhile.error and not references.num_lost(meanwhile)
        row.require(is_whole, f"who came meanwhile has no answer: {meanwhile.error}")
    num_comments = sum(heard.num_comments for heard in moved)
    row.notes.append(f"{num_comments} comments meanwhile")
    is_long = row.recovery_s is not None and row.recovery_s > Limits().keepalive_s + 1.0
    row.require(num_comments > 0 or not is_long, "streams that waited long had no comment")
    await asyncio.to_thread(app.await_whole, WHOLE_S)
    return _close(row, traffic)


async def router_dies(app: Application, references: References) -> Row:
    """Ray's proxy answers: streams end at once, and nothing is left in targets and drafters."""
    row = Row("router killed")
    async with Traffic(app, references) as traffic:
        await traffic.flow(3.0)
        cut = traffic.running
        struck = kill(*app.replicas("Router").values())
        while not all(heard.ended for heard in cut) and time.monotonic() < struck + 10:
            await asyncio.sleep(0.01)
        row.detection_s = max((heard.ended or time.monotonic()) - struck for heard in cut)
        row.require_within(row.detection_s, 1.0, "connections end")
        await asyncio.to_thread(app.await_whole, WHOLE_S)
        served = next((h for h in traffic.heard if h.began > struck and h.ended and not h.error), None)
        until = time.monotonic() + 30
        while served is None and time.monotonic() < until:
            await asyncio.sleep(0.1)
            served = next((h for h in traffic.heard if h.began > struck and h.ended and not h.error), None)
        row.recovery_s = served.samples[0].at - struck if served is not None else None
        row.require(served is not None, "no answer afterwards")
    kinds = sorted({heard.error for heard in cut})
    row.notes.append(f"the streams' ends: {', '.join(kinds)}")
    row.require(all(heard.error or heard.ended < struck for heard in cut), "a cut stream looks whole")
    typed = [heard.error for heard in cut if heard.places]
    row.require(set(typed) <= {"connection"}, f"our client told {typed}")
    row.num_lost, row.num_errors = traffic.num_lost, sum(bool(heard.error) for heard in cut)
    row.notes.append(f"{len(traffic.errors) - row.num_errors} requests failed meanwhile")
    row.require(row.num_lost == 0, "a token was other than it should")
    # Replicas look for state whose time is over four times in that time.
    left = await asyncio.to_thread(app.await_nothing_left, 1.25 * app.settings.session_ttl_s + 1.0)
    row.require(not left, f"left over: {left}")
    return row


async def _speculation(row: Row, traffic: Traffic, struck: float, ready: float, timeout_s: float) -> None:
    """When drafts stopped, and when they were back."""
    lost = await traffic.await_round(struck, drafted=False, timeout_s=10.0)
    row.detection_s = None if lost is None else lost - struck
    row.require_within(row.detection_s, DETECTED_S, "a round without drafts")
    back = await traffic.await_round(max(ready, lost or ready), drafted=True, timeout_s=timeout_s)
    row.recovery_s = None if back is None else back - ready
    row.require_within(row.recovery_s, timeout_s, "drafts are back")


def _count_classic(row: Row, traffic: Traffic, struck: float) -> None:
    told = [s for s in traffic.samples(struck) if s.is_inner and s.drafted is not None]
    row.notes.append(f"{sum(not s.drafted for s in told)} of {len(told)} row-rounds without drafts")


async def _recovery(row: Row, traffic: Traffic, struck: float, moved: list, timeout_s: float) -> None:
    """When the rows had a place again, and when the last of them went on."""
    on = await traffic.await_tokens(moved, struck + 0.05, timeout_s)  # what was on its way still comes
    row.recovery_s = None if on is None else on - struck
    row.require_within(row.recovery_s, timeout_s, "every stream goes on")
    placed = [at for heard in moved for at, _ in heard.places if at > struck]
    row.detection_s = min(placed) - struck if placed else None


def _await_drafter(app: Application, old: set[int]) -> float:
    """When a replica that is not one of the old ones first answered."""
    while not app.stop.is_set():
        if set(app.replicas("Drafter").values()) - old and app.stats("Drafter"):
            return time.monotonic()
        time.sleep(0.1)
    return time.monotonic()
