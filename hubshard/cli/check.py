"""`hubshard verify` and `hubshard diff`: is it whole, and how do two of them differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hubshard.cli.common import Events, Json, Quiet, Revision, Token, Variant, echo_json, interruptible
from hubshard.messages import counted
from hubshard.sizes import format_size

__all__ = ["diff", "verify"]

Target = Annotated[str, typer.Argument(help="A directory, a .safetensors file, or org/name[@revision].")]


@interruptible("nothing was written.", at_once=True)
def verify(
    target: Target,
    *,
    against: Annotated[str | None, typer.Option(help="A repo or directory whose files it must equal.")] = None,
    revision: Revision = None,
    variant: Variant = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Read every file once and check it. Size, hash, every tensor of the index; exit status 1 if something is wrong."""
    from hubshard.cli.progress import reporting
    from hubshard.report import verify as run

    with reporting(quiet=quiet, events=events) as on_event:
        found = run(target, against=against, revision=revision, variant=variant, token=token, on_event=on_event)
    if as_json:
        echo_json({**asdict(found), "ok": found.ok})
    else:
        for problem in found.problems:
            typer.echo(f"{problem.path}: {problem.what}" if problem.path else problem.what)
        at = "" if Path(target).exists() else f" at {found.commit}"
        unknown = f", {found.unknown:,} without a known hash (--against REPO has one)" if found.unknown else ""
        typer.echo(
            f"{counted(found.tensors, 'tensor')}, {format_size(found.nbytes)}{at}: "
            f"{counted(found.files, 'file')} checked by hash{unknown}, {counted(len(found.problems), 'problem')}"
        )
    if not found.ok:
        raise typer.Exit(1)


@interruptible("nothing was written.", at_once=True)
def diff(
    a: Target,
    b: Target,
    *,
    variant: Variant = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever their shards. Exit status 0 whether or not they differ."""
    from hubshard.report import diff as run

    found = run(a, b, variant=variant, token=token)
    if as_json:
        echo_json(asdict(found))
        return
    for sign, names in (("-", found.removed), ("+", found.added), ("~", found.changed)):
        for name in names:
            typer.echo(f"{sign} {name}")
    for name, (before, after) in found.reshaped.items():
        typer.echo(f"! {name}: {before.dtype} {list(before.shape)} is {after.dtype} {list(after.shape)}")
    typer.echo(
        f"{found.same:,} equal, {len(found.changed):,} changed (~), {len(found.reshaped):,} of another dtype or shape "
        f"(!), {len(found.added):,} added (+), {len(found.removed):,} removed (-)"
    )
