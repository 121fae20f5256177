"""Large bodies straight from the socket into memory that is used again and again.

uvicorn hands on each piece of a body as a new `bytes`, after three copies of it. Where a body says how long it is, the
rest of it is taken by a protocol of its own instead, for which the kernel writes into one of two buffers while the
other is worked on. Then uvicorn's protocol gets the connection back, as if it had seen the end of the body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

__all__ = ["DirectHttp", "Intake", "take_rest"]

_BLOCK_BYTES = 4 << 20
_LEAST_BYTES = 64 << 10  # the rest of smaller bodies is likely to be there already
_EXTENSION = "hubshard.connection"


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
    if not isinstance(http, DirectHttp) or not length.isdecimal() or "transfer-encoding" in request.headers:
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
    """Takes the rest of one body, in blocks of 4 MiB, the last one excepted; one is taken in ahead."""

    def __init__(self, http: DirectHttp, rest_bytes: int) -> None:
        self._http = http
        self._left = rest_bytes
        self._free = deque(memoryview(bytearray(min(_BLOCK_BYTES, rest_bytes))) for _ in range(2))
        self._filling = self._free.popleft()
        self._filled = 0
        self._ready: deque[memoryview] = deque()
        self._changed = asyncio.Event()
        self._lost = False

    async def blocks(self) -> AsyncIterator[memoryview]:
        """The blocks in order; each is valid until the next is asked for.

        Raises:
            ClientDisconnect: the connection ended before the body did.
        """
        while True:
            while not self._ready:
                if self._lost:
                    raise ClientDisconnect
                if not self._left:
                    return
                self._changed.clear()
                await self._changed.wait()
            block = self._ready.popleft()
            yield block
            self._free.append(memoryview(block.obj))
            self._go_on()

    async def drop(self) -> None:
        """Let the rest of the body come, for nothing: a client looks for the answer when all is sent."""
        async for _ in self.blocks():
            pass

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
            self._filling = self._free.popleft()
        else:
            self._http.flow.pause_reading()

    def _go_on(self) -> None:
        is_open = not self._lost and not self._http.transport.is_closing()
        if self._left and self._http.flow.read_paused and is_open:
            self._filling = self._free.popleft()
            self._http.flow.resume_reading()

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
