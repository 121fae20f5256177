"""What a disk, or what lies on it, may do to a pull: refuse a write, or lead it elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hubshard.disk import hint_for, is_full, is_out_of_files
from hubshard.errors import FormatError, HubshardError, StoreError
from hubshard.sizes import format_size

__all__ = ["check_own_folder", "refused_by_disk"]


@contextmanager
def refused_by_disk(path: Path, *, lacking: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Raise StoreError, with the path and what to do, for what the disk refuses.

    Args:
        path: is named where the system names none.
        lacking: bytes that are still to be written there, as far as that is known.
    """
    try:
        yield
    except HubshardError:
        raise
    except OSError as error:
        place = error.filename2 or error.filename or path
        raise StoreError(f"{place}: cannot write: {error.strerror or error}", hint=_hint(error, lacking())) from error


def _hint(error: OSError, lacking_bytes: int) -> str:
    if error.errno == errno.EFBIG:
        return "the disk, or the system (`ulimit -f`), takes no file that large"
    if is_full(error):
        space = f"at least {format_size(lacking_bytes)}" if lacking_bytes else "some space"
        return f"free {space} there and run it again: what has arrived is kept"
    if is_out_of_files(error):
        return f"{hint_for(error)}; what has arrived is kept"
    return "see to the folder, or pull to another one (--local-dir, --cache-dir or HF_HOME)"


def check_own_folder(root: Path, private: Path, *, folders: Sequence[str], files: Sequence[str]) -> None:
    """Refuse a directory whose folder for pulls is elsewhere, or is none.

    What is noted there says which weights a pull may delete. Through a link it would be what is true of another
    directory, and what arrives would be written outside of this one.

    Args:
        root: the directory.
        private: the folder within it.
        folders: names within that one which are folders, where they are there.
        files: names which are files.

    Raises:
        FormatError: a link that leads elsewhere, a file in the place of a folder, or a folder in that of a file.
    """
    if root.is_symlink() and not root.exists():
        raise FormatError(
            f"{root} is a link to {root.readlink()}, which is not there",
            hint="make that directory, or name another one",
        )
    real = Path(os.path.realpath(root))
    own = [path for path in (*reversed(private.parents), private) if path.is_relative_to(root) and path != root]
    for path in [*own, *(private / name for name in (*folders, *files))]:
        is_elsewhere = Path(os.path.realpath(path)) != real / path.relative_to(root)
        if is_elsewhere:
            raise FormatError(
                f"{path} is a link that leads elsewhere: to {os.path.realpath(path)}",
                hint="a pull needs a folder of its own in each directory: remove the link, or pull elsewhere",
            )
        is_file = path.name in files and path.parent == private
        is_right = path.is_file() if is_file else path.is_dir()
        if path.exists() and not is_right:
            raise FormatError(
                f"{path} should be a {'file' if is_file else 'folder'}, and is none",
                hint="a pull keeps its own things there: move it away, or pull elsewhere",
            )
