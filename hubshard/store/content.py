"""Reading the content of a file to be: in order, checked against what was promised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from hubshard.errors import IntegrityError
from hubshard.protocols import Buffer, Content

__all__ = ["CheckedContent", "blocks_of", "read_all", "sample_of", "sha256_of"]

_BLOCK_BYTES = 4 * 1024 * 1024


def blocks_of(data: Content, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[memoryview]:
    """The content from its start, in non-empty blocks of at most `block_bytes`; each valid until the next."""
    for buffer in _buffers(data, block_bytes):
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, block_bytes):
            yield view[start : start + block_bytes]


def _buffers(data: Content, block_bytes: int) -> Iterator[Buffer]:
    if not isinstance(data, Path):
        yield from data()
        return
    block = memoryview(bytearray(block_bytes))
    with data.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            yield block[:count]


class CheckedContent:
    """A pass over content that counts and hashes, and refuses content that is not as promised.

    Args:
        data: the content.
        path: for messages.
        nbytes: the size promised.
        sha256: the hash promised in hex, or None.
        hashes: False where nothing is promised and whoever takes the blocks hashes them too.
    """

    def __init__(self, data: Content, *, path: str, nbytes: int, sha256: str | None, hashes: bool = True) -> None:
        self._data = data
        self._path = path
        self._nbytes = nbytes
        self._sha256 = sha256
        self._hash = hashlib.sha256() if hashes or sha256 is not None else None

    @property
    def sha256(self) -> str:
        """Of what has passed, in hex; it must hash for that."""
        if self._hash is None:
            raise ValueError(f"{self._path} is not hashed here")
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[memoryview]:
        """The blocks; the check of size and hash comes after the last.

        Raises:
            IntegrityError: as soon as it is known that the content is not as promised.
        """
        passed = 0
        for block in blocks_of(self._data):
            passed += block.nbytes
            if passed > self._nbytes:
                raise _changed(self._path, f"it has more than the {self._nbytes} bytes promised")
            if self._hash is not None:
                self._hash.update(block)
            yield block
        if passed != self._nbytes:
            raise _changed(self._path, f"it has {passed} bytes, not {self._nbytes}")
        if self._sha256 is not None and self.sha256 != self._sha256:
            raise _changed(self._path, f"its sha256 is {self.sha256}, not {self._sha256}")


def sample_of(data: Content, count: int) -> bytes:
    """The first `count` bytes, fewer where there are fewer."""
    sample = bytearray()
    for block in blocks_of(data, block_bytes=count):
        sample += block[: count - len(sample)]
        if len(sample) == count:
            break
    return bytes(sample)


def read_all(data: Content, *, path: str, nbytes: int, sha256: str | None) -> tuple[bytes, str]:
    """The whole content and its sha256, for small files.

    Raises:
        IntegrityError: it is not as promised.
    """
    checked = CheckedContent(data, path=path, nbytes=nbytes, sha256=sha256)
    content = b"".join(bytes(block) for block in checked)
    return content, checked.sha256


def sha256_of(data: Content, *, path: str, nbytes: int) -> str:
    """The sha256 of the content in hex, by a pass over it.

    Raises:
        IntegrityError: it has another size.
    """
    checked = CheckedContent(data, path=path, nbytes=nbytes, sha256=None)
    for _ in checked:
        pass
    return checked.sha256


def _changed(path: str, why: str) -> IntegrityError:
    return IntegrityError(f"{path}: {why}", hint="did the source change while it was read? run it again")
