"""`hubshard verify` and `hubshard diff`: is it whole, and how do two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import Events, Json, Quiet, Revision, Token, Variant, echo_json, interruptible
from hubshard.messages import counted
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.report import Problem

__all__ = ["diff", "verify"]

_MOST_LINES = 12  # of one kind of problems

Target = Annotated[str, typer.Argument(help="A directory, a .safetensors file, or org/name[@revision].")]


@interruptible("nothing was written.", at_once=True)
def verify(
    target: Target,
    *,
    against: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="A repo or directory: what a pull takes of it must be there, and equal."),
    ] = None,
    revision: Revision = None,
    variant: Variant = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Read every file once and check it: size, hash, every tensor of the index. Exit status 1 if something is wrong.

    The Hub knows the hashes of its files, and a directory those of files that a pull or `hf download` put there. Of
    others no hash is checked without --against, which the last line says, and by itself is no failure.
    """
    from hubshard.cli.progress import reporting
    from hubshard.report import verify as run

    with reporting(quiet=quiet, events=events) as on_event:
        found = run(target, against=against, revision=revision, variant=variant, token=token, on_event=on_event)
    if as_json:
        echo_json({**asdict(found), "ok": found.ok})
    else:
        _print_problems(found.problems)
        at = "" if Path(target).exists() else f" at {found.commit}"
        checked = f"{counted(found.files, 'file')} checked by hash" if found.files else "no hash was checked"
        problems = counted(len(found.problems), "problem")
        typer.echo(f"{counted(found.tensors, 'tensor')}, {format_size(found.nbytes)}{at}: {checked}, {problems}")
        if found.unknown:
            typer.echo(_unknown(found.unknown, target, against))
    if not found.ok:
        raise typer.Exit(1)


def _print_problems(problems: Sequence[Problem]) -> None:
    """Line by line, the first of each kind."""
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    for kind, found in by_kind.items():
        for problem in found[:_MOST_LINES]:
            typer.echo(f"{problem.path}: {problem.what}" if problem.path else problem.what)
        if len(found) > _MOST_LINES:
            typer.echo(f"and {len(found) - _MOST_LINES:,} more ({kind}); --json has all")


def _unknown(files: int, target: str, against: str | None) -> str:
    if against is not None:
        return f"Not compared: {counted(files, 'file')} that {against} does not have"
    what = f"Hashes of {counted(files, 'file')} were not checked, as none is known here: only sizes and headers were."
    return f"{what} To check them: hubshard verify {target} --against REPO"


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
