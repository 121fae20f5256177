"""`hubshard hub serve` and `hubshard hub gc`: a Hub of one's own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hubshard.cli.common import Json, a_directory, echo_json, interruptible
from hubshard.messages import counted
from hubshard.sizes import format_size
from hubshard.target import check_endpoint

__all__ = ["hub"]

hub = typer.Typer(help="A Hub of your own: set HF_ENDPOINT to its URL.", no_args_is_help=True, rich_markup_mode=None)

Root = Annotated[Path, typer.Option(parser=a_directory, metavar="DIR", help="The directory that holds everything.")]


@hub.command()
@interruptible("the Hub has stopped; whatever it acknowledged is on disk.")
def serve(
    root: Root,
    *,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; the default is for this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0 for any free one.")] = 8000,
    token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[USER[:ROLE]=]TOKEN",
            help="A user's token; roles: read, write (default), admin, repo:ns/name. Without USER, an administrator's. "
            "Without any, everybody may do everything.",
        ),
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="How clients reach it, where that is not how they ask.")
    ] = None,
) -> None:
    """Serve a directory until it is stopped. The first line on stdout is the URL."""
    from hubshard.hubserver import Settings
    from hubshard.hubserver import serve as run
    from hubshard.hubserver.auth import ADMIN_NAME

    if public_url is not None:
        check_endpoint(public_url)
    tokens: dict[str, str] = {}
    for text in token or ():
        user, separator, secret = text.partition("=")
        tokens[secret if separator else text] = user if separator else f"{ADMIN_NAME}:admin"
    run(root, host=host, port=port, settings=Settings(tokens=tokens or None, public_url=public_url), on_ready=_say)


def _say(url: str) -> None:
    typer.echo(url)
    typer.echo(f"Use it: HF_ENDPOINT={url} hubshard publish … (Ctrl-C stops it)", err=True)


@hub.command()
@interruptible("run it again; it removes only what nobody needs.")
def gc(
    root: Root,
    *,
    grace_hours: Annotated[
        float, typer.Option(metavar="HOURS", min=0, help="Uploads that no commit names are spared so long.")
    ] = 24.0,
    as_json: Json = False,
) -> None:
    """Remove what no repo can reach any more. Safe beside a running server."""
    from hubshard.hubserver import gc as collect

    report = collect(root, grace_hours * 3600)
    if as_json:
        echo_json(asdict(report))
        return
    typer.echo(f"{format_size(report.freed_bytes)} freed")
    typer.echo(
        f"{counted(report.commits, 'commit')}, {counted(report.lfs_files, 'large file')}, "
        f"{counted(report.objects, 'plain object')}, {counted(report.xorbs, 'xorb')}, "
        f"{counted(report.blobs, 'small file')} removed"
    )
