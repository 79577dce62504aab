"""``python -m deployments.jobs.parity``: the exactness gate on a worker of the cluster, its verdict as JSON.

Exit code 0 only if the gate and its controls hold.
"""

import typer

from deployments import cli
from deployments.cli_measure import (
    DrafterOption,
    DtypeOption,
    LimitOption,
    MarginOption,
    RowsOption,
    TargetOption,
    TemperatureOption,
    WidthOption,
    dtype_of,
)
from deployments.jobs import worker
from deployments.jobs.worker import CpusOption, OutputOption, PathOption, ResourcesOption
from deployments.measurements import Models, ParityRun
from deployments.settings import EMBEDDED


def main(
    prompts: PathOption,
    output: OutputOption,
    limit: LimitOption = 16,
    rows: RowsOption = 4,
    width: WidthOption = None,
    margin: MarginOption = 1.0,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = None,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
    num_cpus: CpusOption = 1.0,
    resources: ResourcesOption = "{}",
) -> None:
    """Compare rows in one window with the same rows alone."""
    measurement = ParityRun(Models(target, drafter, dtype_of(dtype)), rows, width, margin, temperature)
    report = worker.play(
        worker.Assignment(measurement, prompts, limit, output, worker.reserved_of(num_cpus, resources))
    )
    raise typer.Exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    cli.run(lambda: typer.run(main))
