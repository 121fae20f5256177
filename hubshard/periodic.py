"""A thread that does something again and again, as long as a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Periodic"]


class Periodic:
    """A context manager whose thread calls `act` every so many seconds.

    Args:
        act: what it does; it does not raise.
        name: of the thread.
        every_seconds: between two calls, and before the first one.
    """

    def __init__(self, act: Callable[[], object], name: str, *, every_seconds: float) -> None:
        self._act = act
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:  # `act` may end what holds the block
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self._act()
