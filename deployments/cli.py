"""The command ``dflash-serve``: reads flags, turns errors into one line, leaves the work to other modules.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from deployments import __version__, cli_doctor, cli_measure
from deployments.settings import EMBEDDED, Settings, SettingsError, find_cache_dir, load_settings
from dflash_core.errors import DFlashError, InvalidRequest

DISTRIBUTION = "dflash-serve"
_MODELS_OWN = "the model's own"

app = typer.Typer(
    help="Serve Qwen3.5-family models with DFlash drafters on Ray Serve and MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

cli_measure.register(app)
cli_doctor.register(app)


def main() -> None:
    """Run ``dflash-serve``."""
    run(app)


def run(command: Callable[[], object]) -> None:
    """Run a command; a failure is one clear line on stderr."""
    try:
        command()
    except SettingsError as error:
        _fail(str(error), code=2)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (DFlashError, OSError) as error:
        _fail(str(error), code=1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (
        Exception
    ) as error:  # the command line's boundary: a bug is one line too, its trace is a log record
        logging.getLogger(__name__).debug("internal error", exc_info=True)
        _fail(f"internal error: {type(error).__name__}: {error} (--verbose shows where)", code=1)


def _fail(message: str, *, code: int) -> None:
    for line in message.splitlines() or ["failed"]:
        print(f"{DISTRIBUTION}: {line}", file=sys.stderr)
    sys.exit(code)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(DISTRIBUTION, __version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, with stack traces.")] = False,
) -> None:
    """Set up what every command shares."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )


def _default(setting: str) -> str:
    """Return a setting's default for the help; a flag left out stays None, so that the file counts."""
    value = Settings.model_fields[setting].default
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")],
    target: Annotated[str, typer.Option(help="Target: embedded, a directory or a hub id.")] = EMBEDDED,
    drafter: Annotated[
        str, typer.Option(help="Drafter: embedded, a directory, a hub id, or none.")
    ] = EMBEDDED,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer.", show_default="1024, or what the context leaves"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0 is greedy.", show_default=_MODELS_OWN)
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, show_default=_MODELS_OWN)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 is off.", show_default=_MODELS_OWN)] = None,
    min_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, show_default=_MODELS_OWN)] = None,
    seed: Annotated[int | None, typer.Option(min=0, show_default="drawn")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Block width; 1 does not draft.", show_default="chosen per round"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
) -> None:
    """Answer one prompt in this process, without Ray; figures go to stderr."""
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    if stop is not None and "" in stop:
        raise typer.BadParameter("--stop must not be empty")
    from deployments import generate as generation

    options = generation.GenerateOptions(
        prompt=_read_stdin() if prompt == "-" else prompt,
        target=target,
        drafter=None if drafter == "none" else drafter,
        sampling=generation.SamplingFlags(temperature, top_k, top_p, min_p, seed),
        max_tokens=max_tokens,
        width=width,
        stop=tuple(stop or ()),
        system=system,
        is_raw=raw,
        cache_dir=find_cache_dir(os.environ),
    )
    print(generation.generate(options, sys.stdout), file=sys.stderr)


def _read_stdin() -> str:
    """Read the prompt, less the newline that a shell puts at its end."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 (byte {error.start})") from None


@app.command()
def up(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default=_default("host"))
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of the HTTP endpoint.", show_default=_default("http_port"))
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the gRPC endpoint.", show_default=_default("grpc_port"))
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Target: embedded, a directory or a hub id.", show_default=_default("target")),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter: embedded, a directory, a hub id, or none.", show_default=_default("drafter")
        ),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Rows of a window.", show_default=_default("max_rows"))
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model for clients; said again, an alias.",
            show_default=_default("served_model_names"),
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster to join (auto, or HOST:PORT).", show_default="own"),
    ] = None,
) -> None:
    """Serve a target and its drafter until Ctrl-C."""
    flags = {
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "target": target,
        "drafter": drafter,
        "max_rows": max_rows,
        "served_model_names": tuple(served_model_name) if served_model_name else None,
        "address": address,
    }
    settings = load_settings(config, flags)

    from deployments.up import up as serve  # Ray takes a second to import

    serve(settings)
