"""The commands that measure: ``bench`` and ``parity``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from deployments.measurements import BenchRun, Chats, Models, ParityRun
from deployments.settings import EMBEDDED

PromptsOption = Annotated[Path, typer.Option(help="Chats as an OpenAI batch file (JSON lines).")]
TargetOption = Annotated[str, typer.Option(help="Target: embedded, a directory or a hub id.")]
DrafterOption = Annotated[str, typer.Option(help="Drafter: embedded, a directory or a hub id.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows that move together.")]
ArmsOption = Annotated[str, typer.Option(help="Comma-separated policies.")]
RepeatOption = Annotated[int, typer.Option(min=1, help="Repetitions that count.")]
AutoWidthOption = Annotated[str, typer.Option(help="Block width, or auto.")]
WidthOption = Annotated[int | None, typer.Option(min=1, help="Block width.", show_default="the drafter's")]
MarginOption = Annotated[float, typer.Option(min=0.0, help="Logits under which two tokens are a near tie.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="0 compares greedily, else with a seed per row.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the device's")
]
ALL_ARMS = "classic,clamp_shared,clamp,per_row_shared,per_row"
LimitOption = Annotated[int, typer.Option(min=1, help="Chats to take from the file.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(bench)
    app.command()(parity)


def bench(
    prompts: PromptsOption,
    limit: LimitOption = 32,
    rows: RowsOption = 4,
    arms: ArmsOption = ALL_ARMS,
    repeat: RepeatOption = 3,
    width: AutoWidthOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
) -> None:
    """Play the same chats under every policy in this process, arms interleaved."""
    play = BenchRun(Models(target, drafter), rows, tuple(arms.split(",")), repeat, width_of(width))
    chats = read_chats(prompts, limit)
    results, report = play.play(chats, lambda line: print(line, file=sys.stderr))
    from deployments import bench as benchmark

    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(json.dumps(benchmark.machine()))
    print(f"{report['prompts']} chats, {rows} rows, width {width}, {repeat} repetitions")
    print(benchmark.HEADER)
    for result in results:
        print(result.line(results[0]))


def parity(
    prompts: PromptsOption,
    limit: LimitOption = 16,
    rows: RowsOption = 4,
    width: WidthOption = None,
    margin: MarginOption = 1.0,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = None,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
) -> None:
    """Compare rows in one window with the same rows alone; exit code 0 only if the gate passes."""
    checks = ParityRun(Models(target, drafter, dtype_of(dtype)), rows, width, margin, temperature).play(
        read_chats(prompts, limit)
    )
    from deployments import parity as gate

    if not gate.show(checks, print):
        raise typer.Exit(1)


def read_chats(prompts: Path, limit: int) -> Chats:
    """The file as a measurement takes it. Raises OSError, InvalidRequest."""
    from deployments.prompts import read_text

    return Chats(read_text(prompts), str(prompts), limit)


def width_of(flag: str) -> int | None:
    """The number, None for auto. Raises BadParameter."""
    if flag != "auto" and not (flag.isdigit() and int(flag) >= 1):
        raise typer.BadParameter("--width is a number of at least 1, or auto")
    return None if flag == "auto" else int(flag)


def dtype_of(flag: str | None) -> str | None:
    """Check the name of a dtype. Raises BadParameter."""
    if flag not in (None, "float32", "bfloat16", "float16"):
        raise typer.BadParameter("--dtype is float32, bfloat16 or float16")
    return flag
