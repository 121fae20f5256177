"""What a failed verb says on stderr: one line, and a hint where there is something to do about it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from types import MappingProxyType

from hubshard.disk import FULL, MORE_FILES, is_out_of_files
from hubshard.errors import HubshardError, StoreError

if sys.platform != "win32":
    import resource

__all__ = ["hint_of", "message_of"]

_FEW_FILES = 256  # hf_xet alone wants some dozens
_ANOTHER = "name another one, or see who may read and write it"
_HINTS = MappingProxyType(
    {
        errno.EACCES: _ANOTHER,
        errno.EPERM: _ANOTHER,
        errno.EROFS: _ANOTHER,
        errno.ENOTDIR: "name a directory; a part of that path is a file",
        errno.EISDIR: "name a file; that is a directory",
        errno.ENAMETOOLONG: "choose a shorter name",
        **dict.fromkeys(FULL, "free some space, or name another disk"),
    }
)


def message_of(error: BaseException) -> str:
    """What happened; of an error of the operating system, which file it is about comes first."""
    if isinstance(error, OSError) and not isinstance(error, HubshardError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def hint_of(error: BaseException) -> str | None:
    """What to do about it, or None."""
    if is_out_of_files(error):
        return f"too many files were open; {MORE_FILES}"
    numbers = (cause.errno for cause in _causes(error) if isinstance(cause, OSError) and cause.errno)
    usual = next((_HINTS[number] for number in numbers if number in _HINTS), None)
    hint = error.hint if isinstance(error, HubshardError) else usual
    most = _open_files_limit()
    is_answer = getattr(error.__cause__, "response", None) is not None  # then it is what the Hub says
    if isinstance(error, StoreError) and not is_answer and most is not None and most < _FEW_FILES:
        few = f"only {most} files may be open, which may be why; {MORE_FILES}"
        return few if hint is None else f"{hint}; {few}"
    return hint


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _open_files_limit() -> int | None:
    if sys.platform != "win32":
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY:
            return most
    return None
