"""Anonymous memory that is counted, used again, and given back to the system at once where it is not."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from typing import Any

__all__ = ["MemoryPool"]


class MemoryPool:
    """Buffers by their exact size; for one thread at a time.

    A buffer is in use for as long as anything stands on the memoryview that `take` returned, a tensor for example. Then
    it comes back by itself, and serves the next `take` of its size. Memory of the system's own allocator would stay
    with the process after it was freed, and so break a budget.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()  # filled from wherever the last user happened to go
        self._allocated = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, in use or free."""
        return self._allocated

    def cost(self, nbytes: int) -> int:
        """Bytes by which `take(nbytes)` would let `self.nbytes` grow."""
        self._collect()
        size = _whole_pages(nbytes)
        return 0 if self._free.get(size) else size

    def take(self, nbytes: int) -> memoryview:
        """A buffer of at least `nbytes`, on a page boundary; what it holds is undefined."""
        self._collect()
        size = _whole_pages(nbytes)
        free = self._free.get(size)
        if free:
            memory = free.pop()
        else:
            memory = mmap.mmap(-1, size, **_private())
            self._allocated += size
        view = memoryview(memory)
        weakref.finalize(view, self._returned.append, memory).atexit = False
        return view

    def trim(self, nbytes: int) -> None:
        """Give free buffers back to the system, until that were `nbytes` or none is left."""
        self._collect()
        for size in sorted(self._free, reverse=True):
            while self._free[size] and nbytes > 0:
                self._free[size].pop().close()
                self._allocated -= size
                nbytes -= size
            if not self._free[size]:
                del self._free[size]

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._free.setdefault(len(memory), []).append(memory)


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _private() -> dict[str, Any]:
    # shared with nobody; Windows has nothing to choose
    options: dict[str, Any] = {}
    if sys.platform != "win32":
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return options
