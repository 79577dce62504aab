"""The commands that measure: ``bench`` and ``parity``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.settings import EMBEDDED
from dflash_core import blas
from dflash_core.request import Sampling

if TYPE_CHECKING:
    from dflash_core.loading import LoadedLane

PromptsOption = Annotated[Path, typer.Option(help="Chats as an OpenAI batch file (JSON lines).")]
TargetOption = Annotated[str, typer.Option(help="Target: embedded, a directory or a hub id.")]
DrafterOption = Annotated[str, typer.Option(help="Drafter: embedded, a directory or a hub id.")]
LimitOption = Annotated[int, typer.Option(min=1, help="Chats to take from the file.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(bench)
    app.command()(parity)


def _load(target: str, drafter: str, dtype: str | None = None) -> "LoadedLane":
    blas.prepare()
    import mlx.core as mx

    from dflash_core.checkpoints import resolve_drafter, resolve_target
    from dflash_core.loading import load_lane

    chosen = None if dtype is None else getattr(mx, dtype)
    return load_lane(resolve_target(target), resolve_drafter(drafter), dtype=chosen)


def bench(
    prompts: PromptsOption,
    limit: LimitOption = 32,
    rows: Annotated[int, typer.Option(min=1, help="Rows that move together.")] = 4,
    arms: Annotated[str, typer.Option(help="Comma-separated policies.")] = (
        "classic,clamp_shared,clamp,per_row_shared,per_row"
    ),
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions that count.")] = 3,
    width: Annotated[str, typer.Option(help="Block width, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
) -> None:
    """Play the same chats under every policy in this process, arms interleaved."""
    if width != "auto" and not (width.isdigit() and int(width) >= 1):
        raise typer.BadParameter("--width is a number of at least 1, or auto")
    lane = _load(target, drafter)
    from deployments import bench as benchmark
    from deployments.prompts import read_prompts
    from dflash_core.checkpoints import resolve_target
    from dflash_core.text import Tokenizer

    requests = read_prompts(prompts, Tokenizer.load(resolve_target(target)), limit=limit)
    options = benchmark.BenchOptions(
        rows=rows,
        arms=tuple(arms.split(",")),
        repeat=repeat,
        width=None if width == "auto" else int(width),
    )
    results = benchmark.run(lane, requests, options, lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(benchmark.report(results, options, len(requests)), indent=2))
        return
    print(json.dumps(benchmark.machine()))
    print(f"{len(requests)} chats, {rows} rows, width {width}, {repeat} repetitions")
    print(benchmark.HEADER)
    for result in results:
        print(result.line(results[0]))


def parity(
    prompts: PromptsOption,
    limit: LimitOption = 16,
    rows: Annotated[int, typer.Option(min=1, help="Rows in one window.")] = 4,
    width: Annotated[
        int | None, typer.Option(min=1, help="Block width.", show_default="the drafter's")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Logits under which two tokens are a near tie.")
    ] = 1.0,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 compares greedily, else with a seed per row.")
    ] = 0.0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the device's")
    ] = None,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
) -> None:
    """Compare rows in one window with the same rows alone; exit code 0 only if the gate passes."""
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter("--dtype is float32, bfloat16 or float16")
    lane = _load(target, drafter, dtype)
    from deployments import parity as gate
    from deployments.prompts import read_prompts
    from dflash_core.checkpoints import resolve_target
    from dflash_core.text import Tokenizer

    sampling = Sampling(temperature=temperature) if temperature > 0 else None
    requests = read_prompts(prompts, Tokenizer.load(resolve_target(target)), limit=limit, sampling=sampling)
    chosen = width or lane.drafter.block_size
    checks = gate.run(lane, requests, gate.ParityOptions(rows=rows, width=chosen, margin=margin))
    if not gate.show(checks, print):
        raise typer.Exit(1)
