"""The typer app: one verb per module, and what becomes of their errors."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, NoReturn

import typer

from hubshard import __version__
from hubshard.cli.check import diff, verify
from hubshard.cli.demo import demo
from hubshard.cli.hub import hub
from hubshard.cli.inspect import inspect
from hubshard.cli.publish import publish
from hubshard.cli.pull import pull
from hubshard.cli.rollback import rollback
from hubshard.errors import HubshardError

__all__ = ["app", "main"]

_EXTRAS = {"torch": "torch", "numpy": "torch", "transformers": "transformers", "accelerate": "transformers"}
"""The extra that brings an optional package; what is not named here comes with `hub`."""

app = typer.Typer(
    name="hubshard",
    help="Publish models to the Hugging Face Hub in shards, pull them back, look into them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts hold brackets that are no markup
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(publish)
app.command()(pull)
app.command()(inspect)
app.command()(verify)
app.command()(diff)
app.command()(rollback)
app.command()(demo)
app.add_typer(hub, name="hub")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Publish models to the Hugging Face Hub in shards, pull them back, look into them."""


def main() -> None:
    """Run the command line; never returns."""
    logging.getLogger("hubshard").addHandler(logging.NullHandler())  # events say it already
    try:
        app()
    except HubshardError as error:
        _fail(str(error), error.hint)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if not package or package == "hubshard":
            raise
        _fail(f"this needs the package {package}", f'pip install "hubshard[{_EXTRAS.get(package, "hub")}]"')
    except OSError as error:
        _fail(str(error), None)


def _fail(message: str, hint: str | None) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    if hint:
        typer.echo(f"Hint: {hint}", err=True)
    sys.exit(1)
