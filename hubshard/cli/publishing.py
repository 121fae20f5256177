"""What `publish` and `promote` share: options, and how what they did is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import Note, echo_json, showing
from hubshard.messages import counted
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.events import Event, OnEvent, Totals
    from hubshard.publish import Published

__all__ = [
    "Branch",
    "CreatePr",
    "Dtype",
    "MaxShardSize",
    "MoveTag",
    "PlanOnly",
    "Private",
    "Staging",
    "StagingOption",
    "Streams",
    "Tag",
    "Title",
    "following",
    "show_published",
    "to_go_on",
]


_BEFORE = "readers see nothing of this publish; run the same command again, it goes on from the finished shards."
_COMMITTING = (
    "its commit was under way: either it shows all of this publish, or nothing has changed; "
    "run the same command again, which finds out."
)
_COMMITTED = (
    "the commit {} shows all of this publish; run the same command again for what may be missing, its check or tag."
)
_DONE = "all of it was done."


class Staging(str, Enum):
    """Where finished shards wait for the one commit."""

    branch = "branch"
    none = "none"


Branch = Annotated[str, typer.Option(metavar="BRANCH", help="Branch to publish to.")]
MaxShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Bound per shard, header included: 5GB, 512MiB.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Cast floating tensors, e.g. to bfloat16; needs torch. With a --variant, config.json keeps its dtype.",
    ),
]
Tag = Annotated[str | None, typer.Option(metavar="NAME", help="Tag the new commit.")]
MoveTag = Annotated[bool, typer.Option("--move-tag", help="The tag may exist already and is moved.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")]
Private = Annotated[
    bool | None,
    typer.Option("--private/--public", help="Visibility of a repo that is made; else the Hub's default for its owner."),
]
Title = Annotated[
    str | None, typer.Option("--commit-message", "--message", "-m", metavar="TEXT", help="Title of the commit.")
]
StagingOption = Annotated[
    Staging,
    typer.Option(
        help="branch: finished shards wait on one, so that a killed run goes on anywhere; none: nothing is kept."
    ),
]
Streams = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Large shards sent at once, one where it is not given: each takes up to 256 MB, and a kill costs it.",
    ),
]
PlanOnly = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the shard plan, after the checks that precede a publish, which ask the Hub; write nothing.",
    ),
]


def to_go_on() -> Note:
    """What is left of a publish that ends before anything is shown of it."""
    return Note(_BEFORE)


def following(note: Note, then: OnEvent) -> OnEvent:
    """An `OnEvent` that passes everything on, and has the note say how far the publish is."""
    note.becomes(_BEFORE)

    def on_event(event: Event) -> None:
        if event.kind == "committing":
            note.becomes(_COMMITTING)
        elif event.kind == "commit":
            note.becomes(_COMMITTED.format(event.detail))
        elif event.kind == "end":
            note.becomes(_DONE)
        then(event)

    return on_event


def show_published(
    published: Published,
    totals: Totals,
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    details: Callable[[], None],
    more: Mapping[str, object] | None = None,
) -> None:
    """What a publish did: one JSON object, or its address, or in words with the sums; of a dry run, its plan.

    Args:
        published: what it did.
        totals: the sums.
        dry_run: it did nothing.
        as_json: show one object.
        quiet: show the address alone.
        details: prints what follows the address.
        more: further values of the object.
    """
    from hubshard.cli.progress import print_totals, totals_record

    address = published.pr_url or published.url
    with nullcontext() if dry_run else showing(f"{address} is published"):
        if as_json:
            echo_json(_record(published) | dict(more or {}) | totals_record(totals))
        elif dry_run:
            _print_plan(published)
        elif quiet:
            typer.echo(address)
        else:
            typer.echo(address if published.changed else f"Unchanged: {published.url} holds all of it already")
            details()
            print_totals(totals)


def _record(published: Published) -> dict[str, object]:
    return {
        "commit": published.commit,
        "url": published.url,
        "pr_url": published.pr_url,
        "tag": published.tag,
        "changed": published.changed,
        "shards": [
            {"path": shard.path, "nbytes": shard.nbytes, "tensors": [spec.name for spec in shard.specs]}
            for plan in published.plans
            for shard in plan.shards
        ],
        "total_bytes": published.total_bytes,
        "deleted": published.deleted,
    }


def _print_plan(published: Published) -> None:
    from hubshard.cli.tables import print_table

    shards = [shard for plan in published.plans for shard in plan.shards]
    rows = [
        (shard.path, f"{len(shard.specs):,}", format_size(shard.nbytes), shard.specs[0].name, shard.specs[-1].name)
        for shard in shards
    ]
    print_table(("shard", ">tensors", ">size", "first tensor", "last tensor"), rows)
    total = format_size(published.total_bytes)
    of_shards = format_size(sum(shard.nbytes for shard in shards))
    typer.echo(f"{counted(len(shards), 'shard')}, {of_shards}; with all other files {total}")
    typer.echo("Dry run: nothing was written.", err=True)
