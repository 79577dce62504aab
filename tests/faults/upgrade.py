"""Events that operators bring about: a changed configuration, and the end."""

import asyncio
import time

from deployments.app import APP_NAME
from deployments.draining import drain
from tests.faults.application import KEYS, Application
from tests.faults.report import Row
from tests.faults.streams import Heard, HttpClient
from tests.faults.traffic import QUESTIONS, References, Traffic

PLACED_S = 30.0  # answers that play on are not placed anew


async def upgrade(app: Application, references: References) -> Row:
    """A changed configuration under load: every replica is another one afterwards, nobody noticed."""
    row = Row("changed configuration deployed")
    async with Traffic(app, references) as traffic:
        await traffic.flow(3.0)
        old = set(app.replicas("Target")) | set(app.replicas("Router"))
        began = time.monotonic()
        await asyncio.to_thread(lambda: app.redeploy(max_queue=app.settings.max_queue + 1))
        row.recovery_s = time.monotonic() - began
        until, lanes = time.monotonic() + PLACED_S, set[str]()
        while not lanes and time.monotonic() < until:
            await traffic.flow(1.0)
            placed = [place for heard in traffic.heard for place in heard.places]
            lanes = {lane for at, lane in placed if at > began + row.recovery_s}
        row.require(bool(lanes), f"no row was placed within {PLACED_S:g} s of the upgrade")
        row.require(not lanes & old, "rows still go to replicas of old")
    row.num_lost, row.num_errors = traffic.num_lost, len(traffic.errors)
    row.require(not row.num_lost, "a token was lost")
    row.require(not row.num_errors, f"streams had errors: {sorted(set(traffic.errors))}")
    row.notes.append(f"{len(traffic.heard)} answers meanwhile")
    return row


async def draining(app: Application, references: References) -> Row:
    """What SIGTERM does to ``dflash-serve up``: running answers come to their end, new ones are refused."""
    row = Row("drained, as by SIGTERM")
    async with HttpClient(app.url, KEYS[0]) as client:
        running = [Heard(question) for question in QUESTIONS[:4]]
        reading = [asyncio.create_task(client.stream(heard.question, heard)) for heard in running]
        while not all(heard.samples for heard in running):
            await asyncio.sleep(0.02)
        began = time.monotonic()
        ending = asyncio.create_task(asyncio.to_thread(drain, APP_NAME, app.settings.request_timeout_s))
        while (await asyncio.to_thread(app.health))["status"] != "draining":
            await asyncio.sleep(0.02)
        row.detection_s = time.monotonic() - began
        refused = await client.stream(QUESTIONS[0], Heard(QUESTIONS[0]))
        row.require((refused.status, refused.error) == (503, "unavailable"), f"told {refused.status}")
        await asyncio.gather(*reading)
        row.require(await ending, "requests were left over")
        row.recovery_s = time.monotonic() - began
    row.num_lost = sum(references.num_lost(heard) for heard in running)
    row.num_errors = sum(bool(heard.error) for heard in running)
    row.require(not row.num_lost and not row.num_errors, "an answer was not whole")
    return row
