"""Reading files that are larger than the memory of the machine, without filling that memory with their cache."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from hubshard.lazy.pages import forget
from hubshard.protocols import Reader, Revision
from hubshard.readers import WrappedReader

__all__ = ["DropBehind", "available_memory"]

_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class DropBehind(WrappedReader):
    """A `Reader` of local files that lets the system drop its cache of what was read.

    For what does not fit into memory as a whole: it would be gone by the time it is read again, and meanwhile it would
    drive out everything else.

    Args:
        store: what is read from.
        root: the local folder that it shows.
    """

    def __init__(self, store: Reader, root: Path) -> None:
        super().__init__(store)
        self._root = root

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into`, and drop what the cache holds of the range."""
        super().read(at, path, start, stop, into)
        with suppress(OSError), (self._root / path).open("rb", buffering=0) as file:
            forget(file.fileno(), start, stop)


def available_memory() -> int | None:
    """Bytes that could be had without driving out what is in use, within the container's limit; None if unknown."""
    found = [limit for limit in (_system(), *map(_limit, _CGROUP_FILES)) if limit is not None]
    return min(found, default=None)


def _system() -> int | None:
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return _physical()


def _physical() -> int | None:
    if sys.platform != "win32" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
