"""`hubshard promote`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hubshard.cli.common import (
    Events,
    ExpectedHead,
    Json,
    MaxRetries,
    MinRate,
    Quiet,
    StallSeconds,
    Token,
    Variant,
    a_directory,
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
from hubshard.sizes import format_size

if TYPE_CHECKING:
    from hubshard.promotion import Promoted

__all__ = ["promote"]

_NOTE = to_go_on()


@interruptible(_NOTE, at_once=True)
def promote(
    repo: Annotated[str, typer.Argument(help="org/name on the Hub, which is to show the model.")],
    *,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Number of the saved step; the newest by default.", min=0)
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="KEY", help='Key of the saved state: model, ema, ...; "" for all tensors.')
    ] = "model",
    branch: Annotated[str, typer.Option(metavar="BRANCH", help="Branch that holds the steps.")] = "resume",
    resume_repo: Annotated[
        str | None, typer.Option(metavar="REPO", help="The repo that holds them, if it is another one.")
    ] = None,
    local_dir: Annotated[
        Path | None,
        typer.Option(
            parser=a_directory,
            metavar="DIR",
            help="Read steps from this directory alone; whether their branch was rolled back is not looked at.",
        ),
    ] = None,
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
    companions: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="A directory or org/name[@revision] whose config and tokenizer go along; may be given again.",
        ),
    ] = None,
    staging: StagingOption = Staging.branch,
    scratch: Annotated[
        Path | None,
        typer.Option(
            parser=a_directory,
            metavar="DIR",
            help="A directory for at most two shards at a time; saves a second download of the step.",
        ),
    ] = None,
    streams: Streams = None,
    max_retries: MaxRetries = None,
    stall_seconds: StallSeconds = None,
    min_rate: MinRate = None,
    dry_run: PlanOnly = False,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Publish the model of a saved training step. It is read by ranges: no torch, no training machine."""
    from hubshard.cli.progress import reporting, totals_of
    from hubshard.promotion import promote as run

    limits = limits_of(max_retries, stall_seconds, min_rate)
    with (
        reporting(quiet=quiet, events=events, limits=limits, note=_NOTE) as then,
        totals_of(following(_NOTE, then)) as (on_event, totals),
    ):
        promoted = run(
            repo,
            step=step,
            part=part,
            branch=branch,
            resume_repo_id=resume_repo,
            local_dir=local_dir,
            revision=revision,
            max_shard_size=max_shard_size,
            variant=variant,
            dtype=dtype,
            tag=tag,
            move_tag=move_tag,
            private=private,
            create_pr=create_pr,
            expected_head=expected_head,
            message=message,
            companions=companions or (),
            staging="branch" if staging is Staging.branch else "none",
            scratch=scratch,
            streams=streams,
            dry_run=dry_run,
            token=token,
            on_event=on_event,
        )
    if dry_run and not as_json:
        typer.echo(f"step {promoted.step} of {promoted.read_from}", err=True)
    details = partial(_print_details, promoted)
    read = {"step": promoted.step, "read_from": promoted.read_from, "read_bytes": promoted.read_bytes}
    show_published(promoted, totals[0], dry_run=dry_run, as_json=as_json, quiet=quiet, details=details, more=read)


def _print_details(promoted: Promoted) -> None:
    from hubshard.cli.tables import print_table

    columns = {
        "step": f"{promoted.step:,}",
        "shards": f"{promoted.shards:,}",
        "tensors": f"{sum(len(shard.specs) for plan in promoted.plans for shard in plan.shards):,}",
        "size": format_size(promoted.total_bytes),
        "read": format_size(promoted.read_bytes),
        "sent": format_size(promoted.sent_bytes),
        "there already": format_size(promoted.skipped_bytes),
        "removed": f"{len(promoted.deleted):,}",
        "tag": promoted.tag or "-",
    }
    print_table([f">{name}" for name in columns], [list(columns.values())])
