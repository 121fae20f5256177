"""`hubshard pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hubshard.cli.common import (
    Events,
    Json,
    Kind,
    MaxRetries,
    MinRate,
    Quiet,
    RepoType,
    Revision,
    StallSeconds,
    Token,
    Variant,
    a_directory,
    interruptible,
    limits_of,
    showing,
)
from hubshard.target import parse_repo

__all__ = ["pull"]


_NOTE = "no half file is shown; run the same command again, it goes on from the bytes that have arrived."


@interruptible(_NOTE, at_once=True)
def pull(
    repo: Annotated[str, typer.Argument(help="org/name[@revision]")],
    *,
    revision: Revision = None,
    local_dir: Annotated[
        Path | None,
        typer.Option(parser=a_directory, metavar="DIR", help="A directory; the Hugging Face cache by default."),
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(parser=a_directory, metavar="DIR", help="Another cache than that of HF_HOME.")
    ] = None,
    variant: Variant = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of files that replace the usual choice; may be given again."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Pattern of files to leave; may be given again.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace and remove in DIR also what is yours: by default that is refused."),
    ] = False,
    max_retries: MaxRetries = None,
    stall_seconds: StallSeconds = None,
    min_rate: MinRate = None,
    token: Token = None,
    repo_type: RepoType = Kind.model,  # noqa: ARG001 - there is one kind
    as_json: Json = False,
    quiet: Quiet = False,
    events: Events = None,
) -> None:
    """Fetch a model, every file checked by its SHA-256. Goes on after a kill; prints where it is."""
    from hubshard.cli.progress import print_fetched, reporting, totals_of
    from hubshard.fetch import pull as fetch

    target = parse_repo(repo)
    revision = target.asked_for(revision)
    limits = limits_of(max_retries, stall_seconds, min_rate)
    with (
        reporting(quiet=quiet, events=events, limits=limits, note=_NOTE) as then,
        totals_of(then) as (on_event, totals),
    ):
        path = fetch(
            target.repo_id,
            revision=revision,
            local_dir=local_dir,
            variant=variant,
            include=include,
            exclude=exclude,
            cache_dir=cache_dir,
            overwrite=overwrite,
            token=token,
            on_event=on_event,
        )
    with showing(f"{target.repo_id} is in {path}"):
        print_fetched(path, totals[0], as_json=as_json, quiet=quiet)
