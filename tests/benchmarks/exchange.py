"""What a round's exchange costs beyond drafting: by reference, by value, by size.

    python -m tests.benchmarks.exchange

A real target-side adapter and real drafter sessions on two Serve replicas, with a drafter that answers at
once. Prints the median and 90th percentile of one whole draft call, in milliseconds.
"""

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from deployments.settings import Place, Settings
from deployments.settings import Transport as Mode

ROUNDS = 150
WARM_UP = 20
SHAPES = ((1, 256), (4, 256), (16, 256), (1, 2560), (4, 2560), (16, 2560))  # rows, feature size
TOKENS = 4  # per row and round
BLOCK = 16


class InstantEngine:
    """Opens sessions over a drafter that computes nothing."""

    def open_drafter(self, settings: Settings) -> Any:
        from deployments.exchange.sessions import Sessions

        return Sessions(cast(Any, InstantDrafter()), "bench", 60.0)


class InstantDrafter:
    block_size = BLOCK

    def extend(self, window_id: str, block: Any) -> None:
        pass

    def draft(self, window_id: str, block: Any, anchors: Any, width: int) -> Any:
        import mlx.core as mx

        from dflash_core.protocols import Drafts, Ready

        mx.eval(block.x)
        return Ready(Drafts(mx.zeros((len(block.row_ids), width - 1), dtype=mx.int32), True))

    def drop(self, window_id: str, row_ids: tuple[str, ...]) -> None:
        pass

    def close(self, window_id: str) -> None:
        pass


class Bench:
    """Plays the target's part of the exchange from inside a replica."""

    async def __init__(self, drafter: Any):
        from deployments.exchange.handle import HandleLink
        from deployments.mlx_thread import MlxThread

        self._thread = MlxThread("bench")
        self._link = HandleLink(drafter)
        self._loop = asyncio.get_running_loop()

    async def measure(self, mode: Mode, rows: int, size: int, prompt: int) -> list[float]:
        return await self._thread.run(lambda: self._measure(mode, rows, size, prompt))

    async def bare(self) -> float:
        return self._bare

    def _measure(self, mode: Mode, rows: int, size: int, prompt: int) -> list[float]:
        import mlx.core as mx

        from deployments.exchange.patience import Patience
        from deployments.exchange.remote import RemoteDrafter
        from deployments.exchange.transport import Transport
        from dflash_core.protocols import FeatureBlock
        from dflash_core.request import RowId, WindowId

        window = WindowId(f"{mode}-{rows}-{size}-{prompt}")
        drafter = RemoteDrafter(self._link, self._loop, Transport(mode), "bench", BLOCK, Patience(30.0, 30.0))
        row_ids = tuple(RowId(str(i)) for i in range(rows))
        anchors = mx.zeros(rows, dtype=mx.int32)
        held, times = 0, []
        for number in range(WARM_UP + ROUNDS if not prompt else 6):
            count = prompt if prompt and number == 0 else TOKENS
            if prompt:  # each time a fresh row with its whole prompt
                drafter.drop(window, row_ids)
                row_ids, held, count = tuple(RowId(f"{number}-{i}") for i in range(rows)), 0, prompt
            x = mx.random.normal((rows, count, size)).astype(mx.bfloat16)
            mx.eval(x)
            starts, counts = np.full(rows, held, np.int32), np.full(rows, count, np.int32)
            began = time.perf_counter()
            drafts = drafter.draft(window, FeatureBlock(row_ids, starts, counts, x), anchors, BLOCK).wait()
            times.append(1000 * (time.perf_counter() - began))
            assert drafts.ids.shape[1] == BLOCK - 1
            held += count
        bare = []
        for _ in range(30):  # what Ray alone takes for a call, at this hour on this machine
            began = time.perf_counter()
            asyncio.run_coroutine_threadsafe(self._link.lengths(window), self._loop).result()
            bare.append(1000 * (time.perf_counter() - began))
        self._bare = float(np.median(bare))
        drafter.close(window)
        return times[WARM_UP:] if not prompt else times[1:]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    root = str(Path(__file__).parents[2])
    os.environ.update(PYTHONPATH=root, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray
    from ray import serve

    from deployments import app
    from deployments.drafter import DrafterReplica

    folder = tempfile.mkdtemp(prefix="dfs", dir="/tmp")
    try:
        ray.init("local", include_dashboard=False, _temp_dir=folder, log_to_driver=False, num_cpus=4)
        serve.start(proxy_location="Disabled")
        settings = Settings()
        options = app._options(settings, Place(num_cpus=1), wants_blas=True)
        sticky = {**options, "request_router_config": app._STICKY}
        drafter = serve.deployment(name="Drafter", **sticky)(DrafterReplica).bind(settings, InstantEngine())
        bench = serve.deployment(name="Bench", **options)(Bench).bind(drafter)
        handle = cast(Any, serve.run(bench, name="bench", route_prefix=None))
        print(
            f"{'rows':>4} {'D':>5} {'KiB':>7}  "
            + "  ".join(f"{m:>13}" for m in ("value", "ref", "auto"))
            + "  bare call"
        )
        for rows, size, prompt in [*[(r, d, 0) for r, d in SHAPES], (1, 2560, 2048), (4, 2560, 2048)]:
            cells, bare = [], []
            for mode in ("value", "ref", "auto"):
                times = handle.measure.remote(mode, rows, size, prompt).result()
                bare.append(handle.bare.remote().result())
                cells.append(f"{np.median(times):6.2f}/{np.quantile(times, 0.9):6.2f}")
            kib = rows * size * 2 * (prompt or TOKENS) / 1024
            print(
                f"{rows:>4} {size:>5} {kib:>7.0f}  " + "  ".join(cells) + f"  {np.median(bare):6.2f}",
                flush=True,
            )
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
