"""`hubshard rollback`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from hubshard.cli.common import Events, ExpectedHead, Json, Token, echo_json, interruptible, showing
from hubshard.cli.publishing import Title
from hubshard.messages import counted
from hubshard.sizes import format_size

__all__ = ["rollback"]


@interruptible("either the branch has moved, or nothing has changed: look at its head.", at_once=True)
def rollback(
    repo: Annotated[str, typer.Argument(help="org/name on the Hub.")],
    *,
    to: Annotated[str, typer.Option(metavar="REV", help="Branch, tag or commit whose files are wanted again.")],
    revision: Annotated[str, typer.Option(metavar="BRANCH", help="The branch that gets them.")] = "main",
    expected_head: ExpectedHead = None,
    message: Title = None,
    token: Token = None,
    as_json: Json = False,
    events: Events = None,
) -> None:
    """Give a branch the files of an earlier revision. One new commit; nothing large is sent, history stays."""
    from hubshard.cli.progress import reporting
    from hubshard.history import rollback as run

    with reporting(quiet=as_json, events=events) as on_event:
        done = run(
            repo,
            to=to,
            revision=revision,
            expected_head=expected_head,
            message=message,
            token=token,
            on_event=on_event,
        )
    with showing(f"{done.url} is rolled back to {to}"):
        if as_json:
            echo_json(asdict(done))
        elif not done.changed:
            typer.echo(f"Unchanged: {done.url} is that already")
        else:
            typer.echo(done.url)
            typer.echo(
                f"{counted(len(done.restored), 'file')} restored, {len(done.removed)} removed, "
                f"{format_size(done.sent_bytes)} sent"
            )
