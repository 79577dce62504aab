"""A sampled answer of the real engine whose lanes die under it, over gRPC: the same tokens as undisturbed."""

import asyncio
from dataclasses import replace

import dflash_core

# isort: split
from deployments.exchange.absent import NoDrafter
from deployments.generation import Generation, GenerationId
from deployments.lane import Lane
from dflash_core.loading import build_target
from dflash_core.pair import TARGET
from dflash_core.request import RowId, Sampling, WindowId
from dflash_core.target import Target
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from tests.deployments.other_cluster import OtherCluster, other_cluster
from tests.deployments.test_desk import TOKENIZER, collect, tokens
from tests.deployments.test_remote import paces, playing, router, until

assert dflash_core
__all__ = ["paces"]  # the fixture of remote lanes' tests holds here too

SAMPLING = Sampling(
    temperature=1.0,
    top_p=0.95,
    seed=2**63 + 5,
    repetition_penalty=1.1,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    min_tokens=60,
)
ASKED = Generation(
    GenerationId("g"),
    "demo",
    tuple(TOKENIZER.encode("def area(width, height):")),
    80,
    SAMPLING,
    TOKENIZER.eos_token_ids,
    (),
    60.0,
)


def play_on(cluster: OtherCluster, target: Target) -> None:
    """Let a cluster's windows be real ones."""

    def open_window(window_id: WindowId) -> Window:
        return Window(window_id, target, NoDrafter(), WindowPolicy(FixedWidth(1), max_rows=1))

    cluster.backend.stage.lane = Lane(open_window, 4)


async def test_an_answer_that_was_begun_on_a_dead_lane_ends_as_it_would_have() -> None:
    target, _ = build_target(TARGET, None)
    async with (
        other_cluster(max_rows=1) as first,
        other_cluster(max_rows=1) as second,
        router(first.port, second.port) as (d, _),
    ):
        play_on(first, target)
        play_on(second, target)
        await until(lambda: d.num_lanes == 2)
        undisturbed = tokens(await collect(d, ASKED))
        assert len(undisturbed) >= 60
        answer = asyncio.ensure_future(collect(d, replace(ASKED, id=GenerationId("again"))))
        await until(lambda: any(len(t.committed) > 20 for w in d._windows for t in w.tickets.values()))
        dying, other = (first, second) if playing(first) else (second, first)
        await dying.kill()
        assert tokens(await answer) == undisturbed
        moved = other.backend.asked[-1]
        assert moved.num_continued > 20
        assert RowId(moved.id) != RowId("again")  # a request of its own over there
