"""``python -m deployments.jobs.batch``: answer a file of requests, as a job on the cluster or from anywhere.

Progress goes to stderr. Exit codes: 0 every line is answered, 1 some failed or the job could not go on,
2 wrong usage, 130 stopped before the end. Submitted again it goes on where it stopped, and asks again what
had failed.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deployments import cli
from deployments.jobs import runner, where
from deployments.jobs.client import Reach
from deployments.jobs.files import check_outlives_job, local_path
from deployments.jobs.journal import Journal, journal_of
from deployments.jobs.progress import Progress, Tally
from deployments.jobs.requests import Line, read_lines, survey
from deployments.keys import keys_of
from deployments.settings import EMBEDDED, load_settings
from dflash_core.errors import InvalidRequest

API_KEY_VARIABLE = "DFLASH_API_KEY"
STOPPED = 130


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to answer, and how."""

    input: str
    output: str
    in_flight: int
    api_key: str | None
    timeout_s: float
    patience_s: float
    progress_s: float


def play(options: BatchOptions, application: AbstractContextManager[where.Application]) -> int:
    """Answer every line that has no answer yet; return the exit code.

    Raises InvalidRequest for an input or output that cannot be used (nothing has been sent then), OSError
    if one of them breaks, Unavailable if there is no application.
    """
    found = survey(options.input)
    journal = journal_of(options.output)
    try:
        finished = journal.open() & found.custom_ids
        tally = Tally(found.num_lines, len(finished))
        if finished:
            _say(f"{len(finished)} of {found.num_lines} rows have their answer from earlier runs")
        is_complete = True
        if tally.num_done < found.num_lines:
            with application as running:
                _say(
                    f"{found.num_lines - len(finished)} rows to {without_secrets(running.url)}, "
                    f"{options.in_flight} in flight"
                )
                is_complete = _run(options, running, finished, journal, tally)
        if is_complete:
            journal.finish()
    finally:
        journal.close()
    return _conclude(tally, options.output, is_complete)


def _run(
    options: BatchOptions,
    application: where.Application,
    finished: frozenset[str],
    journal: Journal,
    tally: Tally,
) -> bool:
    reach = Reach(application.url, options.api_key, options.timeout_s, options.patience_s)
    work = runner.Work(_unfinished(options.input, finished), reach, options.in_flight)
    progress = Progress(tally, period_s=options.progress_s)
    try:
        return asyncio.run(runner.run(work, journal, tally, progress, application.stop))
    finally:
        progress.close()


def _unfinished(path: str, finished: frozenset[str]) -> Iterator[Line]:
    return (line for line in read_lines(path) if line.custom_id not in finished)


def _conclude(tally: Tally, output: str, is_complete: bool) -> int:
    if not is_complete:
        _say(f"stopped with {tally.num_done} of {tally.num_lines} rows done; run it again to go on")
        return STOPPED
    if tally.num_failed:
        codes = ", ".join(f"{count} {code}" for code, count in sorted(tally.codes.items()))
        _say(f"{tally.num_failed} of {tally.num_lines} rows failed ({codes}); all results are in {output}")
        return 1
    _say(f"all {tally.num_lines} rows are answered, in {output}")
    return 0


def without_secrets(url: str) -> str:
    """The address for a log: a name and a password may be part of it."""
    scheme, separator, rest = url.rpartition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _say(message: str) -> None:
    print(f"batch: {message}", file=sys.stderr, flush=True)


def main(
    input_: Annotated[
        str, typer.Option("--input", help="OpenAI batch file: a path or a URL that fsspec knows; .gz too.")
    ],
    output: Annotated[str, typer.Option(help="Batch results, a line per line of the input; likewise.")],
    in_flight: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 32,
    app: Annotated[str, typer.Option(help="Name of the application on the cluster.")] = "dflash",
    url: Annotated[
        str | None,
        typer.Option(help="Address of a server, without /v1.", show_default="found on the cluster"),
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Start an application for this batch, and end it after.")
    ] = False,
    target: Annotated[str | None, typer.Option(help="With --standalone.", show_default=EMBEDDED)] = None,
    drafter: Annotated[str | None, typer.Option(help="With --standalone.", show_default=EMBEDDED)] = None,
    max_rows: Annotated[int | None, typer.Option(help="With --standalone.", show_default="16")] = None,
    config: Annotated[
        Path | None, typer.Option(help="With --standalone: YAML file of settings; flags win over it.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the server's key.", show_default=f"${API_KEY_VARIABLE}")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one try may take.")] = 900.0,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds to try again: no answer, 502, 503, 504; a 500 thrice.")
    ] = 300.0,
    progress_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between lines of progress, where there is no terminal.")
    ] = 10.0,
) -> None:
    """Answer a file of requests; run again, go on where it stopped."""
    check_outlives_job(output)
    if local_path(input_) is not None and local_path(input_) == local_path(output):
        raise InvalidRequest("input and output are the same file")
    flags = {"target": target, "drafter": drafter, "max_rows": max_rows}
    if not standalone and (config is not None or any(value is not None for value in flags.values())):
        raise typer.BadParameter("--target, --drafter, --max-rows and --config go with --standalone")
    if standalone and url is not None:
        raise typer.BadParameter("--standalone starts an application of its own: leave --url out")
    cluster, key = where.cluster_of(os.environ), _read_key(api_key_file, os.environ)
    if url is not None:
        application = where.at(url)
    elif standalone:
        settings = load_settings(config, {**flags, "address": cluster})
        key = key or next(iter(keys_of(settings)), None)
        application = where.of_our_own(settings, output)
    else:
        application = where.on_cluster(app, cluster or "auto")
    options = BatchOptions(
        input=input_,
        output=output,
        in_flight=in_flight,
        api_key=key,
        timeout_s=timeout,
        patience_s=patience,
        progress_s=progress_every,
    )
    raise typer.Exit(play(options, application))


def _read_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The first line of the file that holds a key, else the environment's; never a flag, which others see."""
    if file is None:
        return environment.get(API_KEY_VARIABLE) or None
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise InvalidRequest(f"{file}: holds no key")
    return key


if __name__ == "__main__":
    cli.run(lambda: typer.run(main))
