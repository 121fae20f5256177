"""Large bodies straight from the socket into memory that is used again and again.

uvicorn hands on each piece of a body as a new `bytes`, after three copies of it. Where a body says how long it is, the
rest of it is taken by a protocol of its own instead, for which the kernel writes into one block of memory while others
are worked on. Then uvicorn's protocol gets the connection back, as if it had seen the end of the body.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

__all__ = ["DirectHttp", "Intake", "take_rest"]

_BLOCK_BYTES = 2 << 20
_BLOCKS = 4  # of one body
_BLOCKS_A_TURN = 16  # before others have the thread
_LEAST_BYTES = 64 << 10  # the rest of smaller bodies is likely to be there already
_MOST_SPARE = 8
_EXTENSION = "hubshard.connection"
_CAN_LEND = sys.platform != "win32"  # there a read is under way, for uvicorn, also while reading is paused

_spare: list[bytearray] = []
"""Blocks for the next bodies: to touch memory for the first time costs more than to receive into it."""


def take_rest(request: Request, seen_bytes: int) -> Intake | None:
    """Take over what is still to come of a body, from whoever asked last to the next answer of `request.receive`.

    Args:
        request: whose last message was asked for, and came, in this step of the event loop.
        seen_bytes: of its body so far.

    Returns:
        None where the rest is small, or of unknown size, or the connection cannot be lent: then it comes as usual.
    """
    http = request.scope.get("extensions", {}).get(_EXTENSION)
    length = request.headers.get("content-length", "")
    is_known = length.isdecimal() and "transfer-encoding" not in request.headers
    if not _CAN_LEND or not isinstance(http, DirectHttp) or not is_known:
        return None
    rest_bytes = int(length) - seen_bytes
    return http.lend(rest_bytes) if rest_bytes >= _LEAST_BYTES and not http.cycle.body else None


class DirectHttp(HttpToolsProtocol):
    """uvicorn's protocol, which lends its connection to who takes the rest of a body."""

    def on_message_begin(self) -> None:
        """Let the application find this connection."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[dict-item]

    def lend(self, rest_bytes: int) -> Intake:
        """Let the rest of the body that comes in now, of which nothing waits here, be taken by somebody else."""
        intake = Intake(self, rest_bytes)
        self.flow.pause_reading()  # which function reads is chosen when reading begins
        self.transport.set_protocol(intake)
        self.flow.resume_reading()
        return intake

    def take_back(self) -> None:
        """Go on with the connection: the body was taken to its end."""
        self.parser = type(self.parser)(self)  # one that has seen nothing yet
        self.flow.pause_reading()
        self.transport.set_protocol(self)
        self.on_message_complete()
        self.flow.resume_reading()


class Intake(asyncio.BufferedProtocol):
    """Takes the rest of one body in blocks: while one is worked on, the next ones come in."""

    def __init__(self, http: DirectHttp, rest_bytes: int) -> None:
        self._http = http
        self._left = rest_bytes
        self._loop = asyncio.get_running_loop()
        self._free = [_block() for _ in range(min(_BLOCKS, -(-rest_bytes // _BLOCK_BYTES)))]
        self._filling = memoryview(self._free.pop())
        self._filled = 0
        self._ready: deque[memoryview] = deque()
        self._changed = asyncio.Event()
        self._lost = False

    async def write_to(self, write: Callable[[memoryview], None], run: Callable[..., Awaitable[None]]) -> None:
        """Hand the blocks to `write` in order; each is valid during the call.

        Args:
            write: takes one block.
            run: runs a function in a thread.

        Raises:
            ClientDisconnect: the connection ended before the body did.
        """
        while await self._is_more():
            await run(self._write_ready, write)
        _spare.extend(self._free[: _MOST_SPARE - len(_spare)])

    async def drop(self) -> None:
        """Let the rest of the body come, for nothing: a client looks for the answer when all is sent."""
        while await self._is_more():
            self._reuse(self._ready.popleft())

    async def _is_more(self) -> bool:
        """Wait for a block; False at the end of the body."""
        while not self._ready:
            if self._lost:
                raise ClientDisconnect
            if not self._left:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    def _write_ready(self, write: Callable[[memoryview], None]) -> None:
        """In a thread: work on what is there and on what comes meanwhile, but let others have the thread at times."""
        for _ in range(_BLOCKS_A_TURN):
            if not self._ready:
                return
            block = self._ready.popleft()
            try:
                write(block)
            finally:
                self._loop.call_soon_threadsafe(self._reuse, block)

    def _reuse(self, block: memoryview) -> None:
        self._free.append(block.obj)  # type: ignore[arg-type]
        is_open = not self._lost and not self._http.transport.is_closing()
        if self._left and self._http.flow.read_paused and is_open:
            self._filling = memoryview(self._free.pop())
            self._http.flow.resume_reading()

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._filling[self._filled : self._filled + self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that came."""
        self._filled += nbytes
        self._left -= nbytes
        if self._left and self._filled < len(self._filling):
            return
        self._ready.append(self._filling[: self._filled])
        self._filled = 0
        self._changed.set()
        if not self._left:
            self._http.take_back()
        elif self._free:
            self._filling = memoryview(self._free.pop())
        else:
            self._http.flow.pause_reading()

    def eof_received(self) -> None:
        """Pass it on."""
        self._http.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits, and uvicorn."""
        self._lost = True
        self._changed.set()
        self._http.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._http.resume_writing()


def _block() -> bytearray:
    return _spare.pop() if _spare else bytearray(_BLOCK_BYTES)
