"""`verify`: is every file what its store, or another one, promises, and is the checkpoint whole?"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hubshard.digests import can_verify, content_id, new_hash
from hubshard.engine import run
from hubshard.errors import HubshardError, NotFoundError
from hubshard.events import OnEvent, Operation, ignore, operation
from hubshard.index import decode_index
from hubshard.names import indexed_suffix
from hubshard.protocols import Entry
from hubshard.readers import ListedReader, read_bytes
from hubshard.sizes import READ_BYTES
from hubshard.sources.model_index import MODEL_INDEX, component_names, models_among, without_folder
from hubshard.sources.safetensors import SafetensorsSource
from hubshard.sources.selection import select
from hubshard.sources.several import variants_by_folder
from hubshard.store.lone_file import LoneFile
from hubshard.store.noted import noted_entries
from hubshard.store.opening import Opened, open_target
from hubshard.store.patience import Patience

if TYPE_CHECKING:
    from hubshard.store.hub_client import Token

__all__ = ["Problem", "Verification", "verify"]

_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        path: the file, or "" for the checkpoint as a whole.
        what: in a sentence.
        kind: "missing", "size", "hash", "unreadable"; "structure" of what keeps a checkpoint from being whole.
    """

    path: str
    what: str
    kind: str = "structure"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and what was found.

    Attributes:
        commit: the revision that was read.
        files: how many files were read in full and hashed.
        unknown: files whose hash nobody promises; their sizes and headers alone were checked.
        tensors: how many tensors the headers hold.
        nbytes: bytes of all files (bytes).
        problems: none when all is well.
    """

    commit: str
    files: int
    unknown: int
    tensors: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    target: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: Token = None,
    endpoint: str | None = None,
    on_event: OnEvent = ignore,
) -> Verification:
    """Read every file of a checkpoint once, and check its size, its hash, and every tensor of the index.

    Of a directory or repo, this holds for the checkpoints of all folders, and for whatever weights lie beside them, of
    another loader or variant; and what `model_index.json` of a pipeline of diffusers names must be there.

    Hashes are those that the store promises. The Hub knows the hash of each file. A directory knows those of files that
    `hubshard.pull` or huggingface_hub has put there, which have noted them beside it, and so does a snapshot of the
    cache. Of other files only size and header are checked, unless it is `against` a repo: see `unknown`.

    Args:
        target: a directory, a file, `org/name[@revision]` or `hf://org/name[@revision]`.
        against: a repo, or a directory. `target` must have all that a pull of the variant would take of it, and each
            file that both have must be equal; files that only `target` has are fine. For an index it is enough that it
            names the same file for each tensor, however it is written.
        revision: of a repo; None for main, or what `target` says.
        variant: as in `model.fp16.safetensors`; of a folder without it the plain weights, if another folder has it.
        token: for the Hub; None for the one that is logged in.
        endpoint: of the Hub; None for the usual one.
        on_event: is told of each step.

    Raises:
        NotFoundError: no such path, repo, revision, or variant of `against`.
        FormatError: a target that names nothing.
    """
    with operation("verify", str(target), on_event) as op:
        patience = Patience(on_retry=op.retry)
        opened = open_target(target, revision=revision, token=token, endpoint=endpoint, patience=patience)
        other = None if against is None else open_target(against, token=token, endpoint=endpoint, patience=patience)
        found = _verify(opened, other, str(against), variant, op)
        op.end(opened.at.commit)
    return found


def _verify(opened: Opened, other: Opened | None, against: str, variant: str | None, op: Operation) -> Verification:
    entries = list(opened.store.list(opened.at))
    op.start(sum(entry.nbytes for entry in entries), opened.at.commit)
    tensors, problems = _structure(opened, entries, variant)
    is_lone = isinstance(opened.store, LoneFile)
    expected, wanted = _noted(opened, entries) if other is None else _of_other(other, variant, is_lone=is_lone)
    if not is_lone:
        who = "a pull had put it there" if other is None else f"{against} has it"
        missing = sorted({*wanted} - {entry.path for entry in entries})
        problems += [Problem(path, f"is missing; {who}", "missing") for path in missing]
    promised = [entry for entry in entries if entry.path in expected and (other or can_verify(expected[entry.path]))]

    def check(entry: Entry) -> Problem | None:
        problem = _check(opened, entry, expected[entry.path], other, op)
        if problem is None or other is None or not _is_same_index(opened, entry, other, expected[entry.path]):
            return problem
        op.tell("verify", entry.path, entry.nbytes, "another form of the same index")
        return None

    checked = run(
        promised,
        cost=lambda entry: min(entry.nbytes, READ_BYTES) + 1,
        work=check,
        budget_bytes=_WORKERS * READ_BYTES,
        workers=_WORKERS,
    )
    problems += [problem for problem in checked if problem is not None]
    return Verification(
        commit=opened.at.commit,
        files=len(promised),
        unknown=len(entries) - len(promised),
        tensors=tensors,
        nbytes=sum(entry.nbytes for entry in entries),
        problems=tuple(problems),
    )


def _noted(opened: Opened, entries: Sequence[Entry]) -> tuple[Mapping[str, Entry], Collection[str]]:
    """What the files should be as far as it is known where they are, and which of them must be there."""
    noted = {} if opened.folder is None else noted_entries(opened.folder, entries)
    return {**{entry.path: entry for entry in entries}, **noted}, noted.keys()


def _of_other(other: Opened, variant: str | None, *, is_lone: bool) -> tuple[Mapping[str, Entry], Collection[str]]:
    """The files of what is compared with, and which of them a pull would take: all, where it would refuse to.

    A lone file wants none beside it.
    """
    listing = other.store.list(other.at)
    expected = {entry.path: entry for entry in listing}
    if is_lone:
        return expected, ()

    def read_index(entry: Entry) -> bytes:
        return read_bytes(other.store, other.at, entry.path, 0, entry.nbytes)

    try:
        taken = select(
            listing, variant=variant, include=None, exclude=None, read_index=read_index, where=other.where or "."
        ).files
    except NotFoundError:
        raise
    except HubshardError:
        # what git and the Hub keep for themselves is no part of a model
        taken = tuple(entry for entry in listing if not entry.path.startswith(".git"))
    return expected, {entry.path for entry in taken}


def _structure(opened: Opened, entries: Sequence[Entry], variant: str | None) -> tuple[int, list[Problem]]:
    """How many tensors the checkpoints of all folders hold, and what keeps one of them from being whole."""
    variants: Mapping[str, str | None] = {"": variant}
    problems: list[Problem] = []
    if opened.path is None:
        models, problems = _components(opened, entries)
        variants = variants_by_folder((entry.path for entry in entries), variant=variant, expected=models)
    store, tensors = ListedReader(opened.store), 0
    read: set[str] = set()
    for folder, chosen in variants.items():
        try:
            with opened.named():
                source = SafetensorsSource(
                    store, opened.at, folder=folder, path=opened.path, variant=chosen, workers=_WORKERS
                )
                tensors += len(source.specs())
                read |= {source.path, *source.weight_files}
        except HubshardError as error:
            problems.append(Problem("", error.message))
    if opened.path is None:
        known = {problem.what for problem in problems}
        problems += [problem for problem in _further_problems(opened, entries, read) if problem.what not in known]
    return tensors, problems


def _further_problems(opened: Opened, entries: Sequence[Entry], read: set[str]) -> Iterator[Problem]:
    """What is wrong with weights of other loaders, variants and names, beside the checkpoints that were opened.

    Args:
        opened: where they are.
        entries: all files.
        read: those that were looked at.
    """
    store = ListedReader(opened.store)

    def look(path: str) -> tuple[Sequence[str], Problem | None]:
        try:
            with opened.named():
                return SafetensorsSource(store, opened.at, path=path).weight_files, None
        except HubshardError as error:
            return (), Problem("", error.message)

    left = [entry.path for entry in entries if entry.path not in read]
    indexes = [path for path in left if indexed_suffix(PurePosixPath(path).name) == "safetensors"]
    found = list(map(look, indexes))
    read = read.union(*(files for files, _ in found))
    files = [path for path in left if path.lower().endswith(".safetensors") and path not in read]
    found += run(files, cost=lambda _: 1, work=look, budget_bytes=4 * _WORKERS, workers=_WORKERS)
    return (problem for _, problem in found if problem is not None)


def _components(opened: Opened, entries: Sequence[Entry]) -> tuple[Sequence[str], list[Problem]]:
    """The models among the components of a pipeline, and what its list of them names in vain."""
    try:
        names = component_names(opened.store, opened.at, entries)
    except HubshardError as error:
        return (), [Problem(MODEL_INDEX, error.message)]
    paths = {entry.path for entry in entries}
    lost = [
        Problem(MODEL_INDEX, f"names the component {name}, but there is no such folder")
        for name in without_folder(names, paths)
    ]
    return models_among(names, paths), lost


def _is_same_index(opened: Opened, entry: Entry, other: Opened, expected: Entry) -> bool:
    if indexed_suffix(PurePosixPath(entry.path).name) is None:
        return False
    try:
        one, two = (
            decode_index(read_bytes(side.store, side.at, file.path, 0, file.nbytes), path=file.path)
            for side, file in ((opened, entry), (other, expected))
        )
    except HubshardError:  # there is a problem, and it is known already
        return False
    return one.weight_map == two.weight_map


def _check(opened: Opened, entry: Entry, expected: Entry, other: Opened | None, op: Operation) -> Problem | None:
    if entry.nbytes != expected.nbytes:
        return Problem(entry.path, f"has {entry.nbytes} bytes, not {expected.nbytes}", "size")
    try:
        if other is not None and not can_verify(expected):  # a directory promises nothing
            expected = replace(expected, sha256=_hash_of(other, replace(expected, sha256=""), lambda _: None))
        digest = _hash_of(opened, expected, lambda nbytes: op.tell("received", entry.path, nbytes))
    except HubshardError as error:
        return Problem(entry.path, error.message, "unreadable")
    if digest != content_id(expected):
        return Problem(entry.path, f"has the hash {digest}, not {content_id(expected)}", "hash")
    op.tell("verify", entry.path, entry.nbytes)
    return None


def _hash_of(opened: Opened, expected: Entry, on_bytes: Callable[[int], None]) -> str:
    """Of a file, the hash that it is expected to have one of."""
    digest = new_hash(expected)
    for block in opened.blocks(expected.path, expected.nbytes, block_bytes=READ_BYTES):
        digest.update(block)
        on_bytes(block.nbytes)
    return digest.hexdigest()
