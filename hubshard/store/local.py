"""A directory as a store: one branch, "main", whose commits replace the directory as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from io import FileIO
from pathlib import Path, PurePosixPath

from hubshard.disk import hint_for, read_exactly, sync_folder
from hubshard.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from hubshard.paths import check_store_path
from hubshard.protocols import Content, Entry, Revision, Staged
from hubshard.store.content import sha256_of
from hubshard.store.local_stage import StagingArea, check_free_space
from hubshard.store.local_swap import OnStep, ignore, locked, recover, swap_in, workspace_of
from hubshard.store.local_tree import AT_REST, FileState, is_private, revision_id, scan, state_of, walk

__all__ = ["LocalStore"]

_MAIN = "main"
_KEPT_REVISIONS = 8


class LocalStore:
    """A directory as a `Store`.

    Its revisions are made by `commit`, which builds the next state beside the directory (unchanged files are linked,
    not copied), makes it durable, and exchanges the two; and by whoever writes into it. Only its newest revision can be
    read: one that was replaced is not there any more. `.git` and `.cache` at its top belong to no revision and stay.
    Links to files are followed where they stay inside (or lead to the blobs of the Hugging Face cache, where the
    directory is a snapshot there).

    `Entry.sha256` is known for files that this object committed, `Entry.blob_id` is a mark of the file otherwise.

    Args:
        root: the directory; it need not exist.
        on_step: called with a name before each step that writes.
        passes_over: whether what could not be taken, such as a link that leads out, is left out instead.
    """

    def __init__(
        self, root: Path, *, on_step: OnStep = ignore, passes_over: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._passes_over = passes_over
        self.root = root.resolve()
        self._on_step = on_step
        self._staging = StagingArea(workspace_of(self.root), on_step)
        self._revisions: dict[str, Mapping[str, FileState]] = {}
        self._sha256: dict[str, str] = {}
        self._reads_ahead = True

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def for_ranges(self) -> LocalStore:
        """The same store, for ranges that lie apart: the system reads no more from the disk than is asked for."""
        other = copy(self)
        other._reads_ahead = False  # noqa: SLF001  # of this class
        return other

    def head(self, branch: str) -> Revision | None:
        """The state of the directory now; None where it does not exist, or for another branch than "main".

        Raises:
            FormatError: a link in it leads out of it.
        """
        if not self.root.exists() and workspace_of(self.root).exists():
            with _explained(self.root), locked(self.root):
                recover(self.root)
        return self._look(branch)

    def _look(self, branch: str = _MAIN) -> Revision | None:
        if not self.root.exists():
            return None
        if not self.root.is_dir():
            raise FormatError(f"{self.root} is not a directory")
        with _explained(self.root):
            files = scan(self.root, self._passes_over)
        commit = revision_id(files)
        self._remember(commit, files)
        return Revision(branch, commit) if branch in {_MAIN, commit} else None

    def list(self, at: Revision) -> Sequence[Entry]:
        """All files of the revision, sorted by path.

        Raises:
            NotFoundError: the directory has changed since.
        """
        return [self._entry(state) for state in self._files(at).values()]

    def read(self, at: Revision, path: str, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes `start` to `stop` of a file.

        Raises:
            NotFoundError: no such file or revision, or the file was replaced since.
            IntegrityError: the file was written since, or is shorter.
        """
        with _explained(self.root), self.open_file(at, path) as file:
            if sys.platform == "linux" and not self._reads_ahead:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.seek(start)
            if read_exactly(file, into.cast("B")[: stop - start]):
                raise IntegrityError(f"{path} in {self.root} ends before byte {stop}")

    def open_file(self, at: Revision, path: str) -> FileIO:
        """A file, open to be read.

        Raises:
            NotFoundError, IntegrityError: as `read`.
        """
        state = self._state(at, path)
        with _explained(self.root), contextlib.ExitStack() as stack:
            file = stack.enter_context(state.real.open("rb", buffering=0))
            _check_unchanged(state, os.fstat(file.fileno()))
            stack.pop_all()
        return file

    def check_unchanged(self, at: Revision, path: str) -> None:
        """See that a file is still what it was.

        Raises:
            NotFoundError, IntegrityError: as `read`.
        """
        state = self._state(at, path)
        with _explained(self.root):
            _check_unchanged(state, state.real.stat())

    def _state(self, at: Revision, path: str) -> FileState:
        state = self._files(at).get(path)
        if state is None:
            raise NotFoundError(f"{path} is not in {self.root}")
        return state

    def stage(self, branch: str, path: str, data: Content, *, nbytes: int, sha256: str | None = None) -> Staged:
        """Write content durably beside the directory; content that is staged there already is not written again.

        Raises:
            IntegrityError: `data` has another size or hash than said.
            StoreError: no room, or the disk failed.
        """
        _check_branch(branch)
        check_store_path(path)
        with _explained(self.root):
            found = self._staging.find(sha256, nbytes) if sha256 is not None else None
            if found is not None and sha256 is not None:
                return Staged(path, nbytes, sha256, {"staged": found})
            name, sha256 = self._staging.add(data, path=path, nbytes=nbytes, sha256=sha256)
        return Staged(path, nbytes, sha256, {"staged": name}, nbytes_sent=nbytes)

    def commit(
        self,
        branch: str,
        *,
        parent: Revision | None,
        add: Sequence[Staged],
        remove: Sequence[str],
        message: str,
        publish_id: str,
    ) -> Revision:
        """Replace the directory by its next state.

        `message` and `publish_id` are kept nowhere: there is no history, and no answer to be lost.

        Raises:
            ConflictError: the directory is not at `parent`.
            FormatError: a path would be a file and a folder, or differ from another by case only.
            StoreError: a staged file is gone, no room, or the disk failed.
        """
        del message, publish_id
        _check_branch(branch)
        with _explained(self.root), locked(self.root):
            recover(self.root, self._on_step)
            self._check_head(parent)
            current = scan(self.root, self._passes_over) if parent else {}
            added = {check_store_path(staged.path): self._content_of(staged, current) for staged in add}
            kept = set(current) - set(remove) - set(added)
            _check_names(kept, added)
            workspace_of(self.root).mkdir(exist_ok=True)
            self._build(added, gone=set(current) - kept)
            swap_in(self.root, self._on_step)
            self._forget_staged(add)
            self._staging.clean()
        return self._committed(add)

    def _check_head(self, parent: Revision | None) -> None:
        head = self._look()
        if (head.commit if head else None) != (parent.commit if parent else None):
            found = "holds other files by now" if head and parent else "exists already" if head else "is gone"
            raise ConflictError(f"{self.root} {found}", hint="look at what is there now, then run it again")

    def _content_of(self, staged: Staged, current: Mapping[str, FileState]) -> Path:
        if staged.receipt:
            return self._staging.file_of(str(staged.receipt["staged"]), staged.nbytes)
        for state in current.values():
            if state.nbytes == staged.nbytes and self._hashed(state) == staged.sha256:
                return state.real
        raise StoreError(f"{staged.path}: no file in {self.root} has the sha256 {staged.sha256}", hint="stage it")

    def _hashed(self, state: FileState) -> str:
        known = self._sha256.get(state.mark)
        return known or sha256_of(state.real, path=state.path, nbytes=state.nbytes)

    def _build(self, added: Mapping[str, Path], *, gone: set[str]) -> None:
        """Make the next state in `new/` of the workspace, durable in all but its own name."""
        new = workspace_of(self.root) / "new"
        self._on_step("build")
        new.mkdir()
        if self.root.exists():
            shutil.copymode(self.root, new)
            for entry in walk(self.root):
                path = PurePosixPath(Path(entry.path).relative_to(self.root).as_posix())
                if path.as_posix() not in gone or is_private(path):
                    _carry(entry, new / path)
        self._on_step("add")
        used: set[Path] = set()
        for path_, file in added.items():
            _place(file, new / path_, own=file in used or not file.parent.name.startswith("staged-"))
            used.add(file)
        self._on_step("sync")
        for folder, _, _ in os.walk(new, topdown=False):
            sync_folder(Path(folder))

    def _forget_staged(self, add: Sequence[Staged]) -> None:
        for staged in add:
            if staged.receipt:
                (workspace_of(self.root) / str(staged.receipt["staged"])).unlink(missing_ok=True)

    def _committed(self, add: Sequence[Staged]) -> Revision:
        head = self._look()
        if head is None:
            raise ConflictError(f"{self.root} was removed just after it was written")
        for staged in add:
            state = self._revisions[head.commit].get(staged.path)
            if state is not None:
                self._sha256[state.mark] = staged.sha256
        return head

    def _files(self, at: Revision) -> Mapping[str, FileState]:
        if at.commit not in self._revisions:
            self.head(_MAIN)
        if at.commit not in self._revisions:
            raise NotFoundError(f"{self.root} has changed since it was looked at ({at.commit[:12]})", hint=AT_REST)
        return self._revisions[at.commit]

    def _remember(self, commit: str, files: Mapping[str, FileState]) -> None:
        self._revisions[commit] = files
        for oldest in list(self._revisions)[:-_KEPT_REVISIONS]:
            self._revisions.pop(oldest, None)

    def _entry(self, state: FileState) -> Entry:
        sha256 = self._sha256.get(state.mark)
        return Entry(state.path, state.nbytes, sha256, sha256 or state.mark)


def _check_unchanged(state: FileState, status: os.stat_result) -> None:
    now = state_of(state.path, state.real, status)
    if (now.device, now.inode) != (state.device, state.inode):
        raise NotFoundError(f"{state.real} was replaced since it was looked at", hint=AT_REST)
    if now.mark != state.mark:
        raise IntegrityError(f"{state.real} was written since it was looked at", hint=AT_REST)


def _check_branch(branch: str) -> None:
    if branch != _MAIN:
        raise FormatError(f"a directory has no branch {branch!r}", hint=f"its one branch is {_MAIN!r}")


def _check_names(kept: set[str], added: Mapping[str, Path]) -> None:
    """Refuse new paths that some file systems could not hold beside the others."""
    by_case = {path.casefold(): path for path in kept}
    for path in added:
        other = by_case.setdefault(path.casefold(), path)
        if other != path:
            raise FormatError(f"{path} and {other} differ by case only", hint="rename one of them")
    for path in kept | set(added):
        for above in PurePosixPath(path).parents:
            if above.as_posix() in added or (path in added and above.as_posix() in kept):
                raise FormatError(
                    f"{above.as_posix()} would be a file and a folder (of {path})", hint="rename one of them"
                )


def _carry(entry: os.DirEntry[str], target: Path) -> None:
    """Put what a directory holds into the next one: links as they are, files as second names of the same bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.is_symlink():
        target.symlink_to(Path(entry.path).readlink())
    elif entry.is_dir():
        target.mkdir(exist_ok=True)
    else:
        _place(Path(entry.path), target, own=False, keep_times=True)


def _place(file: Path, target: Path, *, own: bool, keep_times: bool = False) -> None:
    """Give a file a second name, or a durable copy where it must be its own or the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not own:
        with contextlib.suppress(OSError):
            os.link(file, target)
            return
    check_free_space(target.parent, file.stat().st_size, what=target.name)
    shutil.copyfile(file, target)
    if keep_times:
        shutil.copystat(file, target)
    with target.open("rb+") as copy:
        os.fsync(copy.fileno())


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Errors of the operating system as ours."""
    try:
        yield
    except (StoreError, NotFoundError):
        raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{error.filename} is not there (any more)", hint="did somebody change it? try again"
        ) from error
    except OSError as error:
        raise StoreError(f"{error.filename or root}: {error.strerror or error}", hint=hint_for(error)) from error
