"""`hubshard resume`: the steps that a training run has saved on a branch."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import Events, Json, Quiet, Token, a_directory, echo_json, interruptible
from hubshard.cli.resume_advise import advise
from hubshard.errors import FormatError
from hubshard.events import OnEvent, ignore
from hubshard.messages import counted
from hubshard.sizes import format_size
from hubshard.target import check_revision, parse_repo

if TYPE_CHECKING:
    from datetime import datetime

    from hubshard.steps.branch import Pruned, StepBranch
    from hubshard.steps.places import OpenStep
    from hubshard.steps.step import Step

__all__ = ["branch_of", "resume"]

resume = typer.Typer(
    help="The steps that a training run has saved on a branch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Repo = Annotated[str, typer.Argument(help="org/name[@branch]")]
Branch = Annotated[
    str | None, typer.Option(metavar="BRANCH", help="The branch that holds the steps; resume where it is not given.")
]
Number = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Number of the step; the newest by default.", min=0)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]


def branch_of(repo: str, branch: str | None, token: str | None, on_event: OnEvent = ignore) -> StepBranch:
    """The branch that people name.

    Raises:
        FormatError: two of them are named.
    """
    from hubshard.steps.branch import StepBranch

    target = parse_repo(repo)
    if check_revision(branch) and target.revision and branch != target.revision:
        raise FormatError(f"two branches are named, {branch!r} and {target.revision!r}", hint="leave one out")
    return StepBranch(target.repo_id, branch or target.revision or "resume", token=token, on_event=on_event)


@resume.command("list")
@interruptible("nothing was changed.", at_once=True)
def list_steps(repo: Repo, *, branch: Branch = None, token: Token = None, as_json: Json = False) -> None:
    """List the steps, their sizes, and whether they can be restored. Oldest first."""
    from hubshard.cli.progress import reporting
    from hubshard.cli.tables import print_table

    with reporting(quiet=True, events=None) as on_event:
        found = branch_of(repo, branch, token, on_event).steps()
    if as_json:
        echo_json([asdict(one) | {"saved_at": one.saved_at and one.saved_at.isoformat()} for one in found])
        return
    rows = [
        (
            f"{one.step:,}",
            format_size(one.nbytes),
            f"{one.files:,}",
            "-" if one.world_size is None else f"{one.world_size:,}",
            _date(one.saved_at),
            one.problem or "whole",
        )
        for one in found
    ]
    print_table((">step", ">size", ">files", ">ranks", "saved", "state"), rows)
    broken = sum(one.problem is not None for one in found)
    total = format_size(sum(one.nbytes for one in found))
    typer.echo(f"{counted(len(found), 'step')}, {total}" + (f", {broken} cannot be restored" if broken else ""))
    if any(one.saved_at is None for one in found):
        typer.echo("No date (-): the branch's history was squashed since, or the Hub does not tell.")


@resume.command()
@interruptible("nothing was changed.", at_once=True)
def show(
    repo: Repo,
    *,
    step: Number = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show what is in a step: tensors, values, files. Reads its manifest alone."""
    from hubshard.cli.progress import reporting

    with reporting(quiet=True, events=None) as on_event:
        opened = branch_of(repo, branch, token, on_event).show(step)
    if as_json:
        echo_json(_step_record(opened))
    else:
        _print_step(opened, tensors=tensors)


@resume.command()
@interruptible("nothing was changed.", at_once=True)
def verify(
    repo: Repo,
    *,
    step: Number = None,
    every: Annotated[bool, typer.Option("--all", help="Every step, rather than one.")] = False,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Read every byte of a step, against the hashes of its manifest. Exit status 1 where something is wrong."""
    from hubshard.cli.progress import reporting

    if every and step is not None:
        raise FormatError("--all and --step are given", hint="leave one out")
    with reporting(quiet=quiet, events=events) as on_event:
        steps = branch_of(repo, branch, token, on_event)
        numbers = [one.step for one in steps.steps()] if every else [step]
        checks = [steps.verify(number) for number in numbers]
    problems = [problem for check in checks for problem in check.problems]
    if as_json:
        echo_json({"ok": not problems, "steps": [asdict(check) for check in checks]})
    else:
        for problem in problems:
            typer.echo(f"{problem.path}: {problem.what}")
        for check in checks:
            typer.echo(
                f"step {check.step:,}: {counted(check.files, 'file')}, {format_size(check.nbytes)} read, "
                f"{counted(len(check.problems), 'problem')}"
            )
    if problems:
        raise typer.Exit(1)


_PULL_NOTE = "what has arrived is kept; run the same command again, it goes on from there."


@resume.command()
@interruptible(_PULL_NOTE, at_once=True)
def pull(
    repo: Repo,
    *,
    local_dir: Annotated[
        Path, typer.Option(parser=a_directory, metavar="DIR", help="A directory that holds a directory per step.")
    ],
    step: Number = None,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Fetch a step, every byte checked. ResumeBranch and HubReader find it there; prints where it is."""
    from hubshard.cli.progress import print_fetched, reporting, totals_of

    with reporting(quiet=quiet, events=events, note=_PULL_NOTE) as then, totals_of(then) as (on_event, totals):
        path = branch_of(repo, branch, token, on_event).pull(step, local_dir)
    print_fetched(path, totals[0], as_json=as_json, quiet=quiet)


_PRUNE_NOTE = "the steps are removed all or not at all; run the same command again for what is left to do."


@resume.command()
@interruptible(_PRUNE_NOTE, at_once=True)
def prune(
    repo: Repo,
    *,
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest stay.", min=1)] = 3,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", help="Multiples of this number stay too.", min=1)
    ] = None,
    pin: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A step that stays too; may be given again.", min=0)
    ] = None,
    broken: Annotated[bool, typer.Option("--broken", help="Remove steps that cannot be restored too.")] = False,
    squash: Annotated[
        bool, typer.Option("--squash", help="Drop the history too, and delete the files that nothing names any more.")
    ] = False,
    dry_run: DryRun = False,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Remove old steps in one commit. Their storage is freed by --squash, now or later."""
    from hubshard.cli.progress import reporting

    with reporting(quiet=quiet, events=events) as on_event:
        done = branch_of(repo, branch, token, on_event).prune(
            keep=keep, keep_every=keep_every, pinned=pin or (), remove_broken=broken, squash=squash, dry_run=dry_run
        )
    if as_json:
        echo_json(asdict(done) | {"dry_run": dry_run})
    else:
        _print_pruned(done, dry_run=dry_run)


@resume.command()
@interruptible("run the same command again for what is left to do.", at_once=True)
def squash(
    repo: Repo,
    *,
    dry_run: DryRun = False,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Drop the branch's history, to free the storage of old steps.

    The files of steps that no branch, tag or pull request names are deleted for good.
    """
    from hubshard.cli.progress import reporting

    with reporting(quiet=quiet, events=events) as on_event:
        freed = branch_of(repo, branch, token, on_event).squash(dry_run=dry_run)
    if as_json:
        echo_json(asdict(freed) | {"dry_run": dry_run})
    else:
        would = "would be " if dry_run else ""
        typer.echo(f"{counted(freed.files, 'file')}, {format_size(freed.nbytes)} {would}deleted for good")


@resume.command()
@interruptible("either the steps are removed, or nothing has changed: list them.", at_once=True)
def rollback(
    repo: Repo,
    *,
    to: Annotated[int, typer.Option(metavar="N", help="The step that is to be the newest.", min=0)],
    dry_run: DryRun = False,
    branch: Branch = None,
    token: Token = None,
    as_json: Json = False,
    events: Events = None,
) -> None:
    """Remove all steps after one, so that a run goes on from it. One commit; history keeps them.

    The disks of the run follow: they pass over what they hold after it.
    """
    from hubshard.cli.progress import reporting

    with reporting(quiet=as_json, events=events) as on_event:
        removed = branch_of(repo, branch, token, on_event).rollback(to, dry_run=dry_run)
    if as_json:
        echo_json({"newest": to, "removed": removed, "dry_run": dry_run})
    elif not removed:
        would = "would pass" if dry_run else "pass"
        typer.echo(
            f"No step removed: step {to:,} is the newest on the branch; the disks of the run {would} over what they "
            "hold after it"
        )
    else:
        would = "would be " if dry_run else ""
        typer.echo(f"{counted(len(removed), 'step')} {would}removed: {', '.join(f'{number:,}' for number in removed)}")


resume.command()(advise)


def _print_pruned(done: Pruned, *, dry_run: bool) -> None:
    from hubshard.cli.tables import print_table

    becomes = "would be removed" if dry_run else "removed"
    rows = [(number, becomes) for number in done.removed]
    rows += [(number, "kept, though broken" if number in done.broken else "kept") for number in done.kept]
    print_table((">step", "becomes"), [(f"{number:,}", what) for number, what in sorted(rows)])
    typer.echo(f"{counted(len(done.removed), 'step')}, {format_size(done.nbytes)}, {becomes}; {len(done.kept):,} kept")
    if done.freed is not None:
        would = "would be " if dry_run else ""
        typer.echo(f"{counted(done.freed.files, 'file')}, {format_size(done.freed.nbytes)} {would}deleted for good")
    elif done.removed and not dry_run:
        typer.echo("The history of the branch keeps them: --squash gives their storage back.")


def _print_step(opened: OpenStep, *, tensors: bool) -> None:
    from hubshard.cli.tables import print_table

    step = opened.step
    typer.echo(f"step {step.step:,} of {opened.folder.where}, saved by {counted(step.world_size, 'rank')}")
    if tensors:
        print_table(
            ("tensor", "dtype", "shape", ">pieces", ">size"),
            [
                (name, at.spec.dtype, _shape(at.spec.shape), f"{len(at.tiling):,}", format_size(at.spec.nbytes))
                for name, at in step.tensors.items()
            ],
        )
    else:
        print_table((">tensors", ">elements", ">size", "part"), _parts(step))
    if step.scalars:
        print_table(("value", "is"), [(name, _brief(value)) for name, value in step.scalars.items()])
    print_table((">size", "file"), [(format_size(file.nbytes), file.name) for file in step.files])
    for name in opened.ignored:
        typer.echo(f"{name}: not part of the step")
    files = counted(len(step.files), "file")
    typer.echo(f"{counted(len(step.tensors), 'tensor')}, {format_size(step.nbytes)} in {files}")


def _parts(step: Step) -> list[tuple[str, str, str, str]]:
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name, placement in step.tensors.items():
        part = str(placement.path[0]) if len(placement.path) > 1 else name.partition(".")[0]
        counts[part] += 1
        elements[part] += placement.spec.numel
        nbytes[part] += placement.spec.nbytes
    return [(f"{counts[part]:,}", f"{elements[part]:,}", format_size(nbytes[part]), part) for part in sorted(counts)]


def _step_record(opened: OpenStep) -> dict[str, object]:
    step = opened.step
    return {
        "step": step.step,
        "world_size": step.world_size,
        "nbytes": step.nbytes,
        "sha256": opened.sha256,
        "tensors": [
            {"name": name, "dtype": at.spec.dtype, "shape": at.spec.shape, "pieces": len(at.tiling)}
            for name, at in step.tensors.items()
        ],
        "scalars": step.scalars,
        "metadata": step.metadata,
        "files": [{"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256} for file in step.files],
        "ignored": opened.ignored,
    }


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _brief(value: object) -> str:
    text = repr(value[0] if isinstance(value, tuple) and len(value) == 1 else value)  # of the only rank
    return text if len(text) <= 100 else f"{text[:97]}..."


def _date(date: datetime | None) -> str:
    return "-" if date is None else f"{date.astimezone():%Y-%m-%d %H:%M:%S}"
