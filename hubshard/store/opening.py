"""From what people name, a path or a repo, to a revision that can be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.errors import FormatError, IncompleteError, IntegrityError, NotFoundError
from hubshard.protocols import Reader, Revision
from hubshard.store.local import LocalStore
from hubshard.store.lone_file import LoneFile
from hubshard.target import RepoTarget, parse_target

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token
    from hubshard.store.patience import Patience

__all__ = ["Opened", "open_path", "open_repo", "open_target"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A revision to read.

    Attributes:
        store: where it is.
        at: which one.
        path: the one file that was named, from the root; None for the whole tree.
        where: for people: the directory, as far as it was named, or `org/name@revision`.
        folder: the directory; None for a repo.
    """

    store: Reader
    at: Revision
    path: str | None = None
    where: str = ""
    folder: Path | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is found wrong with its content names the repo and revision, or the directory."""
        try:
            yield
        except (NotFoundError, FormatError, IncompleteError, IntegrityError) as error:
            error.add_place(self.where, known_by=self.where.partition("@")[0])
            raise

    def blocks(self, path: str, nbytes: int, *, block_bytes: int) -> Iterator[memoryview]:
        """A file's bytes in order; each block is valid until the next is asked for.

        Args:
            path: of the file.
            nbytes: its size (bytes).
            block_bytes: of a block, the last one excepted.
        """
        buffer = memoryview(bytearray(min(nbytes, block_bytes)))
        for start in range(0, nbytes, block_bytes):
            block = buffer[: min(block_bytes, nbytes - start)]
            self.store.read(self.at, path, start, start + block.nbytes, block)
            yield block


def open_target(
    target: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: Token = None,
    endpoint: str | None = None,
    patience: Patience | None = None,
    passes_over: Callable[[str], bool] = lambda _: False,
) -> Opened:
    """The revision that `target` names: a directory, a file, `org/name[@revision]` or `hf://org/name[@revision]`.

    Args:
        target: a path or a repo.
        revision: of a repo; None for main, or what `target` says.
        token: for the Hub.
        endpoint: of the Hub.
        patience: with a bad line to the Hub; None for the usual.
        passes_over: whether what a directory could not give, such as a link that leads out, is left out instead.

    Raises:
        FormatError: it is neither, or two revisions are named.
        NotFoundError: no such path, repo or revision.
    """
    parsed = parse_target(target if isinstance(target, str) else Path(target))
    if isinstance(parsed, RepoTarget):
        return open_repo(parsed, revision=revision, token=token, endpoint=endpoint, patience=patience)
    if revision is not None:
        raise FormatError(f"{parsed} is a path, which has no revision {revision!r}", hint="leave revision out")
    return open_path(parsed, passes_over)


def open_path(path: Path, passes_over: Callable[[str], bool] = lambda _: False) -> Opened:
    """A directory, a weight file on its own, or the directory of an index.

    Args:
        path: of it.
        passes_over: as in `open_target`.

    Raises:
        NotFoundError: there is no such path.
    """
    if path.is_dir() or path.name.endswith(".json"):
        store: Reader = LocalStore(path if path.is_dir() else path.parent, passes_over=passes_over)
        named = None if path.is_dir() else path.name
    else:
        store, named = LoneFile(path), path.name
    at = store.head("main")
    if at is None:
        raise NotFoundError(f"{path} does not exist", hint="give a directory, a .safetensors file or org/name")
    folder = path if named is None else path.parent
    return Opened(store, at, named, str(folder) if folder.name else "", folder)


def open_repo(
    target: RepoTarget,
    *,
    revision: str | None,
    token: Token,
    endpoint: str | None,
    patience: Patience | None = None,
) -> Opened:
    """A repo on the Hub, at the commit where its branch or tag is now.

    Raises:
        FormatError: two revisions are named.
        NotFoundError: no such repo or revision.
    """
    from hubshard.store.hub import HubStore  # noqa: PLC0415  # the client is slow to import

    branch = target.asked_for(revision) or "main"
    store = HubStore(target.repo_id, token=token, endpoint=endpoint, patience=patience)
    at = store.head(branch)
    if at is None:
        raise NotFoundError(f"{target.repo_id} has no revision {branch!r}", hint="see its branches, tags and commits")
    return Opened(store, at, where=f"{target.repo_id}@{branch}")
