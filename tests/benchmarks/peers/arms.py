"""The arms by the names that the command line knows."""

import sys
from collections.abc import Callable, Collection

from tests.benchmarks.peers import dspark, mlxlm, ours, vlm, zlab
from tests.benchmarks.peers.setting import Play, Setting

#: Name to the line's label and what loads the arm.
ARMS: dict[str, tuple[str, Callable[[Setting], Play]]] = {
    "one": ("mlx-lm one by one", mlxlm.one_by_one),
    "batch": ("mlx-lm BatchGenerator, {rows} rows", mlxlm.batch_generator),
    "dspark": ("mlx-dspark batched baseline, {rows} rows", dspark.batched_baseline),
    "zlab": ("z-lab dflash one by one", zlab.z_lab),
    "vlm": ("mlx-vlm batched DFlash, {rows} rows", vlm.batched_dflash),
    "classic": ("classic, {rows} rows", ours.classic),
    "wide": ("per row, {rows} rows, whole block", ours.wide),
    "auto": ("per row, {rows} rows, width auto", ours.auto),
}


def make_arms(names: Collection[str], setting: Setting) -> dict[str, Play]:
    """Load the arms asked for, in the order of ``ARMS``.

    One that is not installed, or says that it cannot run this pair, is left out, and that is said.
    """
    arms: dict[str, Play] = {}
    for name, (label, load) in ARMS.items():
        if name not in names:
            continue
        try:
            arms[label.format(rows=setting.rows)] = load(setting)
        except (ImportError, NotImplementedError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return arms
