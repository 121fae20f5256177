"""One local file to be read as a revision of its own, whatever lies beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path

from hubshard.disk import read_exactly, refusal
from hubshard.errors import HubshardError, IntegrityError, NotFoundError
from hubshard.protocols import Entry, Revision
from hubshard.store.local_tree import AT_REST

__all__ = ["LoneFile"]

_BRANCH = "main"


class LoneFile:
    """A `Reader` of one file; its revision changes when the file does.

    Raises:
        NotFoundError: it is no file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise NotFoundError(f"{path} {what}", hint="give a directory, a .safetensors file or org/name")
        self.path = path

    def head(self, branch: str) -> Revision | None:
        """The file as it is now; None for another branch than "main"."""
        return Revision(_BRANCH, _state(self.path.stat())) if branch == _BRANCH else None

    def list(self, at: Revision) -> Sequence[Entry]:
        """The one file.

        Raises:
            NotFoundError, IntegrityError: as `read`.
        """
        with self._explained():
            status = self.path.stat()
        self._check(status, at)
        return [Entry(self.path.name, status.st_size, None, at.commit)]

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop`.

        Raises:
            NotFoundError: another path.
            IntegrityError: the file has changed, or is shorter.
        """
        with self.open_file(at, path) as file, self._explained():
            file.seek(start)
            if read_exactly(file, into.cast("B")[: stop - start]):
                raise IntegrityError(f"{self.path} ends before byte {stop}")

    def open_file(self, at: Revision, path: str) -> FileIO:
        """The file, open to be read.

        Raises:
            NotFoundError, IntegrityError: as `read`.
        """
        if path != self.path.name:
            raise NotFoundError(f"{path}: only {self.path} was opened")
        with self._explained(), ExitStack() as stack:
            file = stack.enter_context(self.path.open("rb", buffering=0))
            self._check(os.fstat(file.fileno()), at)
            stack.pop_all()
        return file

    def check_unchanged(self, at: Revision, path: str) -> None:  # noqa: ARG002  # there is one file
        """See that it is still what it was.

        Raises:
            NotFoundError, IntegrityError: as `read`.
        """
        with self._explained():
            self._check(self.path.stat(), at)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the operating system as ours."""
        try:
            yield
        except HubshardError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.path} is not there any more", hint=AT_REST) from error
        except OSError as error:
            raise refusal(error, self.path) from error

    def _check(self, status: os.stat_result, at: Revision) -> None:
        if _state(status) != at.commit:
            raise IntegrityError(f"{self.path} has changed since it was opened", hint=AT_REST)


def _state(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_dev}-{status.st_ino}"
