"""Memory through which bytes pass that cannot be read straight into their place."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["PinnedStaging", "PlainStaging", "Staging"]

_DEPTH = 2  # one is filled while the other is copied from


class Staging(Protocol):
    """Buffers for the threads of a load, each thread its own."""

    def buffer(self, nbytes: int) -> memoryview:
        """Memory of so many bytes, until this thread asks for the next."""

    def copying(self) -> AbstractContextManager[Any]:
        """Around the copies from this thread's buffer to where its bytes belong."""

    def finish(self) -> None:
        """Wait for all copies of all threads."""


class PlainStaging:
    """Ordinary memory, used again: fresh memory costs more than a read.

    Args:
        kept_bytes: buffers up to this size are kept.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._mine = threading.local()

    def buffer(self, nbytes: int) -> memoryview:
        """Memory of so many bytes, until this thread asks for the next."""
        buffer: bytearray | None = getattr(self._mine, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = bytearray(nbytes)
            if nbytes <= self._kept_bytes:
                self._mine.buffer = buffer
        return memoryview(buffer)[:nbytes]

    def copying(self) -> AbstractContextManager[Any]:
        """Around the copies; they are done when they return."""
        return _Nothing()

    def finish(self) -> None:
        """Nothing is left to wait for."""


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return None


class PinnedStaging:
    """Page-locked memory from which a CUDA device copies by itself while the next piece is read.

    Each thread has a ring of two buffers and a stream; a buffer is filled again when the copy from it is done. The
    streams begin after what the creating thread's stream holds, so that tensors made before may be filled.

    Args:
        device: that the bytes go to.
        kept_bytes: size of each buffer; larger pieces get memory of their own.
    """

    def __init__(self, device: torch.device, kept_bytes: int) -> None:
        import torch  # noqa: PLC0415  # slow, and optional

        self._device = device
        self._kept_bytes = kept_bytes
        self._mine = threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()
        self._before = torch.cuda.current_stream(device).record_event()

    def buffer(self, nbytes: int) -> memoryview:
        """Page-locked memory of so many bytes, once the copy that was made from it before is done."""
        ring = self._ring()
        ring.turn = (ring.turn + 1) % _DEPTH
        event, memory = ring.events[ring.turn], ring.buffers[ring.turn]
        if event is not None:
            event.synchronize()
        if memory is None or memory.nbytes < nbytes:
            memory = _pinned(max(nbytes, self._kept_bytes))
            ring.buffers[ring.turn] = memory
        return memoryview(memory.numpy().data).cast("B")[:nbytes]

    def copying(self) -> AbstractContextManager[Any]:
        """Around the copies: they run on this thread's stream, and the buffer waits for them."""
        return _OnStream(self._ring())

    def finish(self) -> None:
        """Wait for all streams."""
        with self._lock:
            for stream in self._streams:
                stream.synchronize()

    def _ring(self) -> _Ring:
        import torch  # noqa: PLC0415  # slow, and optional

        ring: _Ring | None = getattr(self._mine, "ring", None)
        if ring is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._before)
            ring = self._mine.ring = _Ring(stream)
            with self._lock:
                self._streams.append(stream)
        return ring


class _Ring:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.turn = 0
        self.buffers: list[torch.Tensor | None] = [None] * _DEPTH
        self.events: list[torch.cuda.Event | None] = [None] * _DEPTH


class _OnStream(AbstractContextManager[None]):
    def __init__(self, ring: _Ring) -> None:
        import torch  # noqa: PLC0415  # slow, and optional

        self._ring = ring
        self._context: Any = torch.cuda.stream(ring.stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._ring.events[self._ring.turn] = self._ring.stream.record_event()
        self._context.__exit__(*error)


def _pinned(nbytes: int) -> torch.Tensor:
    import torch  # noqa: PLC0415  # slow, and optional

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
