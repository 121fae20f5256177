"""Replacing a directory by another so that a kill at any moment leaves the old or the new, whole.

Beside the directory `name` lies, only while something is under way, `.name.hubshard/`: a folder of staged files per
process, `new/` being built, `ready/` complete, `old/` replaced. Where the system can exchange two names at once (Linux,
macOS) the directory is there all the time; elsewhere `recover` finishes what a kill between two renames left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hubshard.disk import sync_folder
from hubshard.errors import FormatError
from hubshard.locks import wait_for_lock

__all__ = ["OnStep", "ignore", "locked", "recover", "remove_tree", "swap_in", "workspace_of"]

OnStep = Callable[[str], None]
"""Called with the name of each step just before it is taken."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux: renameat2(2)
_RENAME_SWAP = 2  # macOS: renamex_np(2)


def ignore(_: str) -> None:
    """An `OnStep` that does nothing."""


def workspace_of(root: Path) -> Path:
    """The folder beside a directory where its next state is made.

    Raises:
        FormatError: nothing is beside the root of a disk.
    """
    if not root.name:
        raise FormatError(f"{root} is the root of a disk, and holds no checkpoint", hint="give a directory below it")
    return root.with_name(f".{root.name}.hubshard")


def swap_in(root: Path, on_step: OnStep) -> None:
    """Put the complete tree `new/` of the workspace in the place of `root`; the lock is held.

    When it returns, the new tree is durable. What was there is then removed.
    """
    workspace = workspace_of(root)
    ready, old = workspace / "ready", workspace / "old"
    on_step("ready")
    (workspace / "new").rename(ready)
    sync_folder(workspace)
    on_step("swap")
    if not root.exists():
        ready.rename(root)
    elif not _exchange(ready, root):
        root.rename(old)
        on_step("between")
        ready.rename(root)
    sync_folder(root.parent)
    sync_folder(workspace)
    on_step("remove")
    remove_tree(ready)
    remove_tree(old)


def recover(root: Path, on_step: OnStep = ignore) -> None:
    """Finish or undo what a killed commit left beside `root`; the lock is held."""
    workspace = workspace_of(root)
    ready, old = workspace / "ready", workspace / "old"
    if not root.exists() and ready.exists():
        ready.rename(root)
    elif not root.exists() and old.exists():
        old.rename(root)
    on_step("recover")
    for leftover in (workspace / "new", ready, old):
        remove_tree(leftover)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all that is in it, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other commits to `root` out, of this and other processes; a kill frees it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        workspace_of(root).mkdir(exist_ok=True)
        with (workspace_of(root) / "lock").open("wb") as file:
            wait_for_lock(file.fileno())
            yield
    else:  # a lock on the folder above leaves no file behind
        descriptor = os.open(root.parent, os.O_RDONLY)
        try:
            wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; False where the system or file system cannot."""
    library: Any = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        return _is_done(library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE), other)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        return _is_done(library.renamex_np(names[0], names[1], _RENAME_SWAP), other)
    return False


def _is_done(result: int, other: Path) -> bool:
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), str(other))
