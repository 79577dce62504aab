"""``python -m deployments.jobs.bench``: the benchmark on a worker of the cluster, its figures as JSON."""

import typer

from deployments import cli
from deployments.cli_measure import (
    ALL_ARMS,
    ArmsOption,
    AutoWidthOption,
    DrafterOption,
    LimitOption,
    RepeatOption,
    RowsOption,
    TargetOption,
    width_of,
)
from deployments.jobs import worker
from deployments.jobs.worker import CpusOption, OutputOption, PathOption, ResourcesOption
from deployments.measurements import BenchRun, Models
from deployments.settings import EMBEDDED


def main(
    prompts: PathOption,
    output: OutputOption,
    limit: LimitOption = 32,
    rows: RowsOption = 4,
    arms: ArmsOption = ALL_ARMS,
    repeat: RepeatOption = 3,
    width: AutoWidthOption = "auto",
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = EMBEDDED,
    num_cpus: CpusOption = 1.0,
    resources: ResourcesOption = "{}",
) -> None:
    """Play the same chats under every policy, arms interleaved."""
    measurement = BenchRun(Models(target, drafter), rows, tuple(arms.split(",")), repeat, width_of(width))
    worker.play(
        worker.Assignment(measurement, prompts, limit, output, worker.reserved_of(num_cpus, resources))
    )


if __name__ == "__main__":
    cli.run(lambda: typer.run(main))
