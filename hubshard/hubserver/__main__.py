"""`python -m hubshard.hubserver --root DIR`: serve a directory; the first line on stdout is the URL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hubshard.errors import HubshardError
from hubshard.hubserver.auth import ADMIN_NAME
from hubshard.hubserver.server import serve
from hubshard.hubserver.state import Settings


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve; the exit code."""
    chosen = _parser().parse_args(arguments)
    settings = Settings(
        tokens=dict(_token(text) for text in chosen.token) or None,
        organizations=dict(text.split("=", 1) for text in chosen.organization),
        public_url=chosen.public_url,
        lfs_part_bytes=chosen.lfs_part_bytes,
        page_size=chosen.page_size,
        oidc_secret=chosen.oidc_secret,
    )
    try:
        serve(
            chosen.root,
            host=chosen.host,
            port=chosen.port,
            settings=settings,
            on_ready=_say,
            stop_at_eof=chosen.stop_at_eof,
        )
    except HubshardError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m hubshard.hubserver", description="An embedded Hugging Face Hub.")
    parser.add_argument("--root", type=Path, required=True, help="the directory that holds everything")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument(
        "--token",
        action="append",
        default=[],
        metavar="USER[:ROLE]=TOKEN",
        help="a user's token; role: read, write (default), admin, repo:ns/name. Without USER, an administrator's."
        " Without any, everybody may do everything",
    )
    parser.add_argument("--organization", action="append", default=[], metavar="NAME=USER,USER", help="its members")
    parser.add_argument("--public-url", help="how clients reach the server, where it is not how they ask")
    parser.add_argument("--oidc-secret", help="checks identity tokens (HS256) that are exchanged for access tokens")
    parser.add_argument("--lfs-part-bytes", type=int, default=defaults.lfs_part_bytes, help="larger uploads are split")
    parser.add_argument("--page-size", type=int, default=defaults.page_size, help="entries per page of a list")
    parser.add_argument("--stop-at-eof", action="store_true", help="stop when stdin ends")
    return parser


def _token(text: str) -> tuple[str, str]:
    """`USER[:ROLE]=TOKEN` → (token, user and role); a bare token is an administrator's."""
    user, separator, token = text.partition("=")
    return (token, user) if separator else (text, f"{ADMIN_NAME}:admin")


def _say(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
