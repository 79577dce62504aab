"""Peers beside us, in one process and run: mlx-lm, mlx-dspark, z-lab's dflash, mlx-vlm, then our arms.

    python -m tests.benchmarks.peers --prompts FILE --limit 32 --rows 4 --repeat 3 [--arms batch,wide,auto]

Greedy, the embedded pair (or --target/--drafter), arms interleaved, first repetition not counted. Prints
tokens per second (min, median, max), the ratio to the first arm and how many answers' token ids equal that
arm's. Arms, in this order:

    one      mlx-lm, one by one
    batch    mlx-lm's BatchGenerator
    dspark   mlx-dspark's batched baseline, no drafts     mlx-dspark==0.20.3, and what vlm needs
    zlab     z-lab's dflash, one by one                   dflash==0.1.0
    vlm      mlx-vlm's batched DFlash                     mlx-vlm==0.7.10 pillow
    classic  ours without drafts; wide: the whole block; auto: the width control

Peers' requirements pin or pull in libraries that are not ours, so they go into a folder of their own:

    uv pip install -p .venv --no-deps --target build/peers \\
        dflash==0.1.0 mlx-vlm==0.7.10 mlx-dspark==0.20.3 pillow
    PYTHONPATH=build/peers .venv/bin/python -m tests.benchmarks.peers ...

An arm that is not installed is left out, and that is said.
"""

import argparse
import json
from pathlib import Path

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
import mlx.core as mx

from deployments.bench import machine
from deployments.prompts import read_prompts
from dflash_core.checkpoints import resolve_drafter, resolve_target
from dflash_core.text import Tokenizer
from tests.benchmarks.peers.arms import ARMS, make_arms
from tests.benchmarks.peers.setting import Setting
from tests.benchmarks.peers.table import compare


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--device", choices=["cpu", "gpu"])
    options = parser.parse_args()
    if options.device is not None:
        mx.set_default_device(getattr(mx, options.device))
    names = options.arms.split(",")
    if unknown := set(names) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    print(json.dumps(machine()))
    target, drafter = resolve_target(options.target), resolve_drafter(options.drafter)
    requests = read_prompts(options.prompts, Tokenizer.load(target), limit=options.limit)
    arms = make_arms(names, Setting(target, drafter, requests, options.rows))
    print(*compare(arms, options.repeat), sep="\n")


if __name__ == "__main__":
    assert dflash_core.blas.prepare() is not None
    main()
