"""Sending files in turn, each of them begun while the one before it is made durable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from hubshard.protocols import Buffer
from hubshard.publish.outgoing import OutFile

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Ahead", "Turn"]

_UNSENT_BYTES = 44 * 10**6  # hf_xet sends nothing of a file before a block of 64 MiB is full, or the file ends
_FAST_BYTES_PER_SECOND = 100 * 10**6

R = TypeVar("R")


class Turn:
    """When the bytes of one file may leave this machine."""

    def __init__(self, *, has_come: bool = True, on_read: Callable[[], None] = lambda: None) -> None:
        self._has_come = threading.Event()
        self._is_given_up = False
        self._on_read = on_read
        if has_come:
            self._has_come.set()

    def come(self) -> None:
        """Let them leave."""
        self._has_come.set()

    def give_up(self) -> None:
        """Let them never leave: whoever waits for that is stopped."""
        self._is_given_up = True
        self._has_come.set()

    def wait(self) -> float:
        """Wait for it; the seconds that it took.

        Raises:
            CancelledError: it will not come.
        """
        began = time.monotonic()
        self._has_come.wait()
        if self._is_given_up:
            raise CancelledError
        return time.monotonic() - began

    def pace(self, buffers: Iterable[Buffer], nbytes: int) -> Iterator[Buffer]:
        """The content of a file of `nbytes` bytes; before its turn, only so much of it that nothing is sent yet.

        What was to be done when it has been read is done where that went fast. On a slow line the processor has time
        enough, and a part of another file would only take memory.
        """
        passed, began = 0, time.monotonic()
        for buffer in buffers:
            passed += memoryview(buffer).nbytes
            if passed > _UNSENT_BYTES or passed >= nbytes:
                began += self.wait()
            yield buffer
        if passed >= _FAST_BYTES_PER_SECOND * (time.monotonic() - began):
            self._on_read()


class Ahead(Generic[R]):
    """Sends files when they are admitted, and begins the next one early; to be used as a context manager.

    Once a file has been read to its end, the processor has little to do until it is durable. In that time the next
    one is read, cut into chunks and hashed, as far as that can be done without sending a byte of it: what a kill may
    cost stays what those cost that were admitted.

    Args:
        files: all that will be admitted, in order.
        send: does it, minding the file's turn.
        may_begin: whether a file may be begun early.
        workers: how many are admitted at once.
    """

    def __init__(
        self,
        files: Sequence[OutFile],
        send: Callable[[OutFile, Turn], R],
        *,
        may_begin: Callable[[OutFile], bool],
        workers: int,
    ) -> None:
        self._send = send
        self._may_begin = may_begin
        self._lock = threading.Lock()
        self._rest = {file.path: file for file in files}
        self._begun: tuple[OutFile, Turn, Future[R]] | None = None
        self._pool = ThreadPoolExecutor(workers + 1, thread_name_prefix="hubshard-ahead")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._rest.clear()
            if self._begun is not None:
                self._begun[1].give_up()
        self._pool.shutdown()

    def send(self, file: OutFile) -> R:
        """Send a file that is admitted."""
        with self._lock:
            self._rest.pop(file.path, None)
            begun = self._begun
            if begun is not None and begun[0] is file:
                self._begun = None
        if begun is None or begun[0] is not file:
            return self._send(file, Turn(on_read=self._begin_next))
        begun[1].come()
        return begun[2].result()

    def _begin_next(self) -> None:
        with self._lock:
            file = next(iter(self._rest.values()), None)
            if self._begun is not None or file is None or not self._may_begin(file):
                return
            del self._rest[file.path]
            turn = Turn(has_come=False, on_read=self._begin_next)
            self._begun = file, turn, self._pool.submit(self._send, file, turn)
