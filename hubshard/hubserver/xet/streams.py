"""Bodies in and out: bounded pieces, disk work in threads, the next piece under way while one is handled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from hubshard.hubserver.direct import take_rest
from hubshard.hubserver.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from io import RawIOBase
    from pathlib import Path

    from starlette.requests import Request

    from hubshard.hubserver.state import HubState

__all__ = ["receive", "send_range"]

_PIECE_BYTES = 1 << 20


async def receive(
    state: HubState, request: Request, write: Callable[[bytes | memoryview], None], *, max_bytes: int
) -> int:
    """Hands a request's body to `write`, in a thread, in order and in pieces, each of which is valid during the call.

    At most about 8 MiB are held: what comes in, what waits, and what is written.

    Returns:
        The size of the body in bytes.

    Raises:
        ApiError: 413: the body is larger than `max_bytes`.
    """
    body = request.stream()
    first = await anext(body, b"")
    if len(first) > max_bytes or int(request.headers.get("content-length", 0)) > max_bytes:
        raise ApiError(413, f"the body has more than {max_bytes} bytes")
    rest = take_rest(request, len(first))
    if rest is None:
        return await _receive_pieces(state, first, body, write, max_bytes=max_bytes)
    try:
        await state.run(write, first)
        await rest.write_to(write, state.run)
    except ClientDisconnect:
        raise
    except Exception:
        await rest.drop()
        raise
    return int(request.headers["content-length"])


async def _receive_pieces(
    state: HubState,
    first: bytes,
    body: AsyncIterator[bytes],
    write: Callable[[bytes | memoryview], None],
    *,
    max_bytes: int,
) -> int:
    nbytes = held_bytes = len(first)
    held = [first]
    writing: asyncio.Task[None] | None = None
    try:
        async for part in body:
            nbytes += len(part)
            if nbytes > max_bytes:
                raise ApiError(413, f"the body has more than {max_bytes} bytes")
            held.append(part)
            held_bytes += len(part)
            if held_bytes >= _PIECE_BYTES:
                if writing is not None:
                    await writing
                writing = asyncio.create_task(state.run(_write_each, write, held))
                held, held_bytes = [], 0
    finally:
        if writing is not None:
            await writing
    await state.run(_write_each, write, held)
    return nbytes


def _write_each(write: Callable[[bytes | memoryview], None], parts: list[bytes]) -> None:
    for part in parts:
        write(part)


async def send_range(state: HubState, path: Path, start: int, stop: int) -> AsyncIterator[bytes]:
    """Bytes [start, stop) of a file, read in a thread, one piece ahead."""
    file, piece = await state.run(_open_at, path, start, min(_PIECE_BYTES, stop - start))
    reading: asyncio.Task[bytes] | None = None
    try:
        while start < stop:
            if not piece:
                raise ApiError(500, f"{path.name}: the file ends {stop - start} bytes early")
            start += len(piece)
            if start < stop:
                reading = asyncio.create_task(state.run(_read, file, min(_PIECE_BYTES, stop - start)))
            yield piece
            if reading is not None:
                piece, reading = await reading, None
    finally:
        if reading is not None:  # the client went away
            await reading
        file.close()


def _open_at(path: Path, start: int, nbytes: int) -> tuple[RawIOBase, bytes]:
    """The file, and its first piece: one step, because small ranges are the most frequent."""
    file = path.open("rb", buffering=0)
    try:
        file.seek(start)
        return file, _read(file, nbytes)
    except OSError:
        file.close()
        raise


def _read(file: RawIOBase, nbytes: int) -> bytes:
    return file.read(nbytes) or b""
