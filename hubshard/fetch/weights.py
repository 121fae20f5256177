"""Whether what is called safetensors is that: an upload that went wrong leaves a page or a pointer under the name."""

from __future__ import annotations

from pathlib import Path

from hubshard.disk import refusal
from hubshard.errors import FormatError
from hubshard.header import check_framing, header_extent
from hubshard.protocols import Entry

__all__ = ["check_safetensors"]

_FIRST_READ_BYTES = 128 * 2**10


def check_safetensors(file: Path, entry: Entry, where: str) -> None:
    """See that a safetensors file is one, also of a dtype that is not known here; of other files, nothing.

    Args:
        file: holds the content.
        entry: what it is in the repo.
        where: names the revision in errors.

    Raises:
        UnsafeFormatError: it is a pickle.
        FormatError: it is something else, or not as long as its header says.
        StoreError: it cannot be read.
    """
    if not entry.path.lower().endswith(".safetensors"):
        return
    try:
        with file.open("rb") as content:
            raw = content.read(_FIRST_READ_BYTES)
            nbytes = header_extent(raw, file_nbytes=entry.nbytes, path=entry.path)
            raw += content.read(max(nbytes - len(raw), 0))
        check_framing(raw, file_nbytes=entry.nbytes, path=entry.path)
    except FormatError as error:
        raise type(error)(
            f"{where}: {error.message}",
            hint=f"so it lies in the repo: have it published again, or leave it out (--exclude {entry.path}, in Python "
            f"exclude=[{entry.path!r}])",
        ) from error
    except OSError as error:
        raise refusal(error, file) from error
