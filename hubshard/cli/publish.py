"""`hubshard publish`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import (
    Events,
    Json,
    Kind,
    MaxRetries,
    MinRate,
    Quiet,
    RepoType,
    StallSeconds,
    Token,
    echo_json,
    interruptible,
    limits_of,
)
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.publish import Published

__all__ = ["Staging", "print_plan", "publish", "published_record"]


class Staging(str, Enum):
    """Where finished shards wait for the one commit."""

    branch = "branch"
    none = "none"


_NOTE = "readers see nothing of this publish; run the same command again, it goes on from the finished shards."


@interruptible(_NOTE, at_once=True)
def publish(
    source: Annotated[str, typer.Argument(help="A directory or file of safetensors, or org/name[@revision].")],
    repo: Annotated[str | None, typer.Argument(help="org/name on the Hub; made if it does not exist.")] = None,
    *,
    revision: Annotated[str, typer.Option(help="Branch to publish to.")] = "main",
    max_shard_size: Annotated[str, typer.Option(help="Bound per shard, header included: 5GB, 512MiB.")] = "5GB",
    variant: Annotated[str | None, typer.Option(help="As in model.fp16.safetensors.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast floating tensors, e.g. to bfloat16; needs torch.")] = None,
    tag: Annotated[str | None, typer.Option(help="Tag the new commit.")] = None,
    move_tag: Annotated[bool, typer.Option("--move-tag", help="The tag may exist already and is moved.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a repo that is made.")
    ] = None,
    expected_head: Annotated[str | None, typer.Option(help="Refuse unless the branch is at this commit.")] = None,
    message: Annotated[str | None, typer.Option("--commit-message", "--message", "-m", help="Title.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Patterns of other files to take along.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Patterns of files to leave behind.")] = None,
    staging: Annotated[
        Staging, typer.Option(help="branch: finished shards are kept, so that a killed run goes on anywhere.")
    ] = Staging.branch,
    staging_batch_size: Annotated[
        str, typer.Option(help="Bytes of finished shards that may wait for a commit on the staging branch.")
    ] = "256MB",
    scratch: Annotated[
        Path | None,
        typer.Option(help="A directory for at most two shards at a time; for slow sources where Xet is off."),
    ] = None,
    max_retries: MaxRetries = None,
    stall_seconds: StallSeconds = None,
    min_rate: MinRate = None,
    abandon: Annotated[
        bool,
        typer.Option("--abandon", help="publish REPO --abandon: drop what unfinished publishes to --revision left."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the shard plan; touch nothing.")] = False,
    token: Token = None,
    repo_type: RepoType = Kind.model,  # noqa: ARG001 - there is one kind
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Publish a model in shards: one commit that readers see whole or not at all."""
    from hubshard.cli.progress import print_totals, reporting, totals_of, totals_record
    from hubshard.publish import push_to_hub

    if abandon:
        _abandon(source, repo, revision=revision, token=token, as_json=as_json)
        return
    if repo is None:
        raise typer.BadParameter("give SOURCE and REPO", param_hint="REPO")
    limits = limits_of(max_retries, stall_seconds, min_rate)
    with (
        reporting(quiet=quiet, events=events, limits=limits, note=_NOTE) as then,
        totals_of(then) as (on_event, totals),
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
            dry_run=dry_run,
            token=token,
            on_event=on_event,
        )
    if as_json:
        echo_json(published_record(published) | totals_record(totals[0]))
    elif dry_run:
        print_plan(published)
    elif quiet:
        typer.echo(published.pr_url or published.url)
    else:
        _print_summary(published)
        print_totals(totals[0])


def _abandon(source: str, repo: str | None, *, revision: str, token: str | None, as_json: bool) -> None:
    from hubshard.publish import abandon

    if repo is not None:
        raise typer.BadParameter("--abandon takes the REPO alone", param_hint="SOURCE")
    dropped = abandon(source, revision=revision, token=token)
    if as_json:
        echo_json({"dropped": dropped})
    elif dropped:
        typer.echo("\n".join(dropped))
    else:
        typer.echo(f"{source} has no unfinished publish to {revision}", err=True)


def published_record(published: Published) -> dict[str, object]:
    """What a publish did, as JSON values."""
    return {
        "commit": published.commit,
        "url": published.url,
        "pr_url": published.pr_url,
        "tag": published.tag,
        "changed": published.changed,
        "shards": [
            {"path": shard.path, "nbytes": shard.nbytes, "tensors": [spec.name for spec in shard.specs]}
            for shard in published.plan.shards
        ],
        "total_bytes": published.total_bytes,
        "deleted": published.deleted,
    }


def print_plan(published: Published) -> None:
    """The shards that a publish would make, as a table."""
    from hubshard.cli.tables import print_table

    plan = published.plan
    rows = [
        (shard.path, f"{len(shard.specs):,}", format_size(shard.nbytes), shard.specs[0].name, shard.specs[-1].name)
        for shard in plan.shards
    ]
    print_table(("shard", ">tensors", ">size", "first tensor", "last tensor"), rows)
    total = format_size(published.total_bytes)
    typer.echo(f"{len(plan.shards)} shard(s), {format_size(plan.nbytes)}; with all other files {total}")
    typer.echo("Dry run: nothing was written.", err=True)


def _print_summary(published: Published) -> None:
    if not published.changed:
        typer.echo(f"Unchanged: {published.url} holds all of it already")
        return
    typer.echo(published.pr_url or published.url)
    sizes = (
        f"{published.shards} shard(s), {format_size(published.total_bytes)} in all: "
        f"{format_size(published.sent_bytes)} sent, {format_size(published.skipped_bytes)} were there already, "
        f"{format_size(published.deduplicated_bytes)} deduplicated"
    )
    typer.echo(sizes)
    if published.deleted:
        typer.echo(f"{len(published.deleted)} stale weight file(s) removed: {', '.join(published.deleted)}")
    if published.tag:
        typer.echo(f"tagged {published.tag}")
