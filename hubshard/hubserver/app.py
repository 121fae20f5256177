"""The server as an ASGI application."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from hubshard.hubserver.api.commit import commit_routes
from hubshard.hubserver.api.discussions import discussion_routes
from hubshard.hubserver.api.lfs import lfs_routes
from hubshard.hubserver.api.refs import ref_routes
from hubshard.hubserver.api.repos import repo_routes
from hubshard.hubserver.api.resolve import resolve_routes
from hubshard.hubserver.api.safetensors import safetensors_routes
from hubshard.hubserver.api.service import service_routes
from hubshard.hubserver.api.tree import tree_routes
from hubshard.hubserver.db import CORE
from hubshard.hubserver.http import Edge
from hubshard.hubserver.state import HubState, Settings, open_state
from hubshard.hubserver.xet.routes import xet_routes
from hubshard.hubserver.xet.tables import XET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from starlette.requests import Request

__all__ = ["SCHEMAS", "create_app", "create_app_with"]

SCHEMAS = (CORE, XET)
"""The tables of every part of the server."""


def create_app(root: Path, *, tokens: Mapping[str, str] | None = None, public_url: str | None = None) -> Starlette:
    """A Hub that keeps everything under a directory.

    Args:
        root: the directory; made when it is missing.
        tokens: token → user and role, see :class:`~hubshard.hubserver.auth.Accounts`; None: everybody may do all.
        public_url: how clients reach the server; None: as each request names it.
    """
    return create_app_with(open_state(root, Settings(tokens=tokens, public_url=public_url), schemas=SCHEMAS))


def create_app_with(state: HubState) -> Starlette:
    """A Hub on an opened state, which is closed when the application ends."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        state.close()

    return Starlette(
        routes=[
            *service_routes(state),
            *repo_routes(state),
            *ref_routes(state),
            *tree_routes(state),
            *commit_routes(state),
            *discussion_routes(state),
            *lfs_routes(state),
            *xet_routes(state),
            *safetensors_routes(state),
            *resolve_routes(state),
        ],
        middleware=[Middleware(Edge)],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lifespan,
    )


def _no_such_route(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else str(error)
    return JSONResponse({"error": text}, status, {"X-Error-Message": text})
