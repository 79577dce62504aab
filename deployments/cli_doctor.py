"""The command ``doctor``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deployments.settings import load_settings


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(
    target: Annotated[str | None, typer.Option(help="Target: embedded, a directory or a hub id.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter: embedded, a directory, a hub id, or none.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(help="Rows of a window, for the memory sum.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster whose nodes to compare (auto, or HOST:PORT).")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Load the pair and play for ten seconds.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Examine this machine, the models and the cluster; exit code 1 on an error, 0 with warnings."""
    flags = {"target": target, "drafter": drafter, "max_rows": max_rows, "address": address}
    settings = load_settings(config, flags)

    from deployments.doctor import DoctorOptions, Report, examine
    from deployments.doctor.finding import Finding

    def told(findings: Iterator[Finding]) -> Iterator[Finding]:
        for finding in findings:
            if not as_json:
                print("\n".join(finding.lines()), flush=True)
            yield finding

    report = Report.of(told(examine(settings, DoctorOptions(has_trial=trial))))
    print(json.dumps(report.as_json(), indent=2) if as_json else report.summary)
    raise typer.Exit(report.exit_code)
