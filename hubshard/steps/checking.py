"""The files of a step, byte by byte against its manifest. No torch."""

from __future__ import annotations

import hashlib

from hubshard.errors import IntegrityError
from hubshard.messages import counted, listed
from hubshard.protocols import Buffer
from hubshard.steps.step import StepFile

__all__ = ["FileCheck"]

_DIGEST_BYTES = 32
_MOST_SHOWN = 3


class FileCheck:
    """Takes the bytes of a file in order, and finds the blocks that are not as they were saved.

    Args:
        file: as the manifest has it.
    """

    def __init__(self, file: StepFile) -> None:
        self.file = file
        self.nbytes = 0
        self.bad_blocks: list[int] = []
        self._whole = hashlib.sha256()
        self._block = hashlib.sha256()
        self._number = 0
        self._room = self._size_of(0)

    def add(self, data: Buffer) -> None:
        """Take in bytes.

        Raises:
            IntegrityError: they are more than the file has.
        """
        left = memoryview(data).cast("B")
        self.nbytes += left.nbytes
        if self.nbytes > self.file.nbytes:
            raise IntegrityError(f"{self.file.name}: more than its {self.file.nbytes} bytes came")
        self._whole.update(left)
        while left.nbytes:
            head, left = left[: self._room], left[self._room :]
            self._block.update(head)
            self._room -= head.nbytes
            if not self._room:
                self._end_block()

    def problem(self) -> str | None:
        """What is wrong with the bytes so far, now that they are all; None where nothing is."""
        file = self.file
        if self.bad_blocks:
            return f"is not as it was saved in {counted(len(self.bad_blocks), 'block')}: {self._shown()}"
        if self.nbytes != file.nbytes:
            return f"has {self.nbytes} bytes, not {file.nbytes}"
        if self._whole.hexdigest() != file.sha256:
            return f"has the sha256 {self._whole.hexdigest()}, not {file.sha256}"
        return None

    def _end_block(self) -> None:
        start = self._number * _DIGEST_BYTES
        saved = self.file.blocks[start : start + _DIGEST_BYTES] or bytes.fromhex(self.file.sha256)
        if self._block.digest() != saved:
            self.bad_blocks.append(self._number)
        self._number += 1
        self._block, self._room = hashlib.sha256(), self._size_of(self._number)

    def _shown(self) -> str:
        size = self.file.block_bytes
        return listed(
            [f"{number} (bytes {number * size} to {self._end_of(number)})" for number in self.bad_blocks],
            most=_MOST_SHOWN,
        )

    def _size_of(self, number: int) -> int:
        return self._end_of(number) - number * self.file.block_bytes

    def _end_of(self, number: int) -> int:
        return min((number + 1) * self.file.block_bytes, self.file.nbytes)
