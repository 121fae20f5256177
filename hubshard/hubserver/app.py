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
from hubshard.hubserver.state import HubState
from hubshard.hubserver.xet.routes import xet_routes
from hubshard.hubserver.xet.tables import XET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

__all__ = ["SCHEMAS", "create_app"]

SCHEMAS = (CORE, XET)
"""The tables of every part of the server."""


def create_app(state: HubState) -> Starlette:
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
