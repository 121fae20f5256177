"""Small JSON files on a disk, which may hold anything by the time they are read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from hubshard.disk import refusal
from hubshard.errors import FormatError
from hubshard.header import decode_json

__all__ = ["read_json"]

_BLOCK_BYTES = 2**16
_NO_FILES = {errno.ENXIO, errno.ELOOP}
"""What the system says of a socket, and of links that lead nowhere."""


def read_json(path: Path, *, what: str, most_bytes: int) -> dict[str, Any]:
    """The JSON object in a small file: nothing is waited for, and no more is read than such a file may have.

    Args:
        path: of the file.
        what: it is, for errors.
        most_bytes: that it may have.

    Raises:
        FileNotFoundError: there is none.
        FormatError: it is no plain file, is larger, or is no JSON object: names it.
        StoreError: the disk refuses to read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_dir() or error.errno in _NO_FILES:
            raise FormatError(f"{path}: the {what} is no file", hint="see what is there") from error
        raise refusal(error, path) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FormatError(f"{path}: the {what} is no file", hint="see what is there")
        raw = bytearray()
        while len(raw) <= most_bytes and (block := os.read(descriptor, _BLOCK_BYTES)):
            raw += block
    except OSError as error:
        raise refusal(error, path) from error
    finally:
        os.close(descriptor)
    if len(raw) > most_bytes:
        raise FormatError(f"{path}: the {what} has more than {most_bytes} bytes", hint="it is something else")
    return decode_json(bytes(raw), path=str(path), what=what)
