"""The typer app: one verb per module, and what becomes of their errors."""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hubshard import __version__
from hubshard.cli.check import diff, verify
from hubshard.cli.demo.command import demo
from hubshard.cli.failing import hint_of, message_of
from hubshard.cli.hub import hub
from hubshard.cli.inspect import inspect
from hubshard.cli.promote import promote
from hubshard.cli.publish import publish
from hubshard.cli.pull import pull
from hubshard.cli.resume import resume
from hubshard.cli.rollback import rollback
from hubshard.errors import FormatError, HubshardError
from hubshard.extras import EXTRAS, to_install
from hubshard.messages import one_line
from hubshard.target import check_endpoint

__all__ = ["app", "main"]

_WHOLE_NUMBERS = {"HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"}
"""What huggingface_hub reads of the environment as such when it is imported (its constants.py); all else is text."""

app = typer.Typer(
    name="hubshard",
    help="Publish models to the Hugging Face Hub in shards, pull them, look into them, and resume training runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts hold brackets that are no markup
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(publish)
app.command()(promote)
app.command()(pull)
app.command()(inspect)
app.command()(verify)
app.command()(diff)
app.command()(rollback)
app.command()(demo)
app.add_typer(resume, name="resume")
app.add_typer(hub, name="hub")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001 - its callback acts on it
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Publish models to the Hugging Face Hub in shards, pull them, look into them, and resume training runs."""
    # huggingface_hub's import would fail with a traceback
    if "HF_ENDPOINT" in os.environ:
        check_endpoint(os.environ["HF_ENDPOINT"])
    for name in sorted(_WHOLE_NUMBERS & os.environ.keys()):
        _check_whole_number(name, os.environ[name])


def _check_whole_number(name: str, value: str) -> None:
    try:
        int(value)
    except ValueError as error:
        raise FormatError(
            f"{name} is {value!r} in the environment, not a whole number", hint=f"correct it, or `unset {name}`"
        ) from error


def main() -> None:
    """Run the command line; never returns."""
    _open_standard_streams()
    logging.getLogger("hubshard").addHandler(logging.NullHandler())  # events say it already
    try:
        app()
    except (HubshardError, OSError) as error:
        _fail(message_of(error), hint_of(error))
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if not package or package == "hubshard":
            raise
        _fail(f"this needs the package {package}", to_install(EXTRAS.get(package, "hub")))
    except MemoryError:
        _fail("out of memory", "give it more, or see what limits it: `ulimit -v`, a container's limit")
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        _fail(str(error), "it is out of memory or processes: see `ulimit -v`, `ulimit -u`, a container's limits")


def _open_standard_streams() -> None:
    # one that whoever started us has closed: the next file to be opened would take its number, and get what is said
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - to the end of the process
    # what the terminal or the file cannot show is written as an escape; a path that is no text goes out as it came in
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _fail(message: str, hint: str | None) -> NoReturn:
    with suppress(OSError):  # nobody may be listening
        typer.echo(f"Error: {one_line(message)}", err=True)
        if hint:
            typer.echo(f"Hint: {one_line(hint)}", err=True)
    sys.exit(1)
