"""`hubshard publish`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import (
    Events,
    ExpectedHead,
    Json,
    Kind,
    MaxRetries,
    MinRate,
    Quiet,
    RepoType,
    StallSeconds,
    Token,
    Variant,
    a_directory,
    echo_json,
    interruptible,
    limits_of,
)
from hubshard.cli.publishing import (
    Branch,
    CreatePr,
    Dtype,
    MaxShardSize,
    MoveTag,
    PlanOnly,
    Private,
    Staging,
    StagingOption,
    Streams,
    Tag,
    Title,
    following,
    show_published,
    to_go_on,
)
from hubshard.messages import counted
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.events import Event
    from hubshard.publish import Published

__all__ = ["publish"]


_NOTE = to_go_on()


@interruptible(_NOTE, at_once=True)
def publish(
    source: Annotated[str, typer.Argument(help="A directory or file of safetensors, or org/name[@revision].")],
    repo: Annotated[str | None, typer.Argument(help="org/name on the Hub; made if it does not exist.")] = None,
    *,
    revision: Branch = "main",
    max_shard_size: MaxShardSize = "5GB",
    variant: Variant = None,
    dtype: Dtype = None,
    tag: Tag = None,
    move_tag: MoveTag = False,
    create_pr: CreatePr = False,
    private: Private = None,
    expected_head: ExpectedHead = None,
    message: Title = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help='Pattern of other files to take along, not all; --include "*" --include .gitignore adds one to all.',
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Pattern of files to leave behind; may be given again.")
    ] = None,
    staging: StagingOption = Staging.branch,
    staging_batch_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Bytes of finished shards that may wait for a commit on the staging branch."),
    ] = "256MB",
    scratch: Annotated[
        Path | None,
        typer.Option(
            parser=a_directory,
            metavar="DIR",
            help="A directory for at most two shards at a time; for slow sources where Xet is off.",
        ),
    ] = None,
    streams: Streams = None,
    max_retries: MaxRetries = None,
    stall_seconds: StallSeconds = None,
    min_rate: MinRate = None,
    abandon: Annotated[
        bool,
        typer.Option("--abandon", help="publish REPO --abandon: drop what unfinished publishes to --revision left."),
    ] = False,
    dry_run: PlanOnly = False,
    token: Token = None,
    repo_type: RepoType = Kind.model,  # noqa: ARG001 - there is one kind
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Publish a model in shards, by one commit. Readers see it whole or not at all."""
    from hubshard.cli.progress import reporting, totals_of
    from hubshard.publish import push_to_hub

    if abandon:
        _NOTE.becomes("run it again for what is left to drop.")
        _abandon(source, repo, revision=revision, token=token, as_json=as_json)
        return
    if repo is None:
        raise typer.BadParameter("it is missing, as in `hubshard publish ./my-model org/name`", param_hint="REPO")
    limits = limits_of(max_retries, stall_seconds, min_rate)
    with (
        reporting(quiet=quiet, events=events, limits=limits, note=_NOTE) as then,
        totals_of(following(_NOTE, then)) as (on_event, totals),
    ):
        published = push_to_hub(
            source,
            repo,
            revision=revision,
            max_shard_size=max_shard_size,
            variant=variant,
            dtype=dtype,
            tag=tag,
            move_tag=move_tag,
            create_pr=create_pr,
            private=private,
            expected_head=expected_head,
            message=message,
            include=include or (),
            exclude=exclude or (),
            staging="branch" if staging is Staging.branch else "none",
            staging_batch_size=staging_batch_size,
            scratch=scratch,
            streams=streams,
            dry_run=dry_run,
            token=token,
            on_event=on_event,
        )
    details = partial(_print_details, published)
    show_published(published, totals[0], dry_run=dry_run, as_json=as_json, quiet=quiet, details=details)


def _abandon(source: str, repo: str | None, *, revision: str, token: str | None, as_json: bool) -> None:
    from hubshard.publish import abandon

    if repo is not None:
        raise typer.BadParameter("--abandon takes the REPO alone", param_hint="SOURCE")
    told: list[Event] = []
    dropped = abandon(source, revision=revision, token=token, on_event=told.append)
    if as_json:
        echo_json({"dropped": dropped, "nbytes": sum(event.nbytes for event in told)})
        return
    for event in told:
        typer.echo(event.path)
        typer.echo(f"branch {event.path} {event.detail}: {format_size(event.nbytes)} to be sent again", err=True)
    if not dropped:
        typer.echo(f"Nothing to drop: {source} has no unfinished publish to {revision}", err=True)


def _print_details(published: Published) -> None:
    if not published.changed:
        return
    sizes = (
        f"{counted(published.shards, 'shard')}, {format_size(published.total_bytes)} in all: "
        f"{format_size(published.sent_bytes)} sent, {format_size(published.skipped_bytes)} were there already"
    )
    if published.deduplicated_bytes:
        sizes += f"; Xet saved {format_size(published.deduplicated_bytes)} of what was sent, known there or compressed"
    typer.echo(sizes)
    if published.deleted:
        typer.echo(f"{counted(len(published.deleted), 'stale file')} removed: {', '.join(published.deleted)}")
    if published.tag:
        typer.echo(f"tagged {published.tag}")
