"""The flow of a pull, from any store into any layout."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hubshard.digests import can_verify, content_id, matches
from hubshard.engine import run
from hubshard.errors import IncompleteError, IntegrityError, NotFoundError, StoreError
from hubshard.events import Event, Gathered, OnEvent
from hubshard.fetch.layout import LOCK, Layout
from hubshard.fetch.lockfile import locked
from hubshard.fetch.on_disk import refused_by_disk
from hubshard.fetch.parts import Part, missing_bytes, name_of
from hubshard.fetch.transfer import Transfer
from hubshard.fetch.weights import check_safetensors
from hubshard.messages import listed
from hubshard.protocols import Entry, Revision, Store
from hubshard.sizes import format_size
from hubshard.sources.selection import ReadIndex, Selection, only_pickled, select

__all__ = ["Request", "pull_from"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What is pulled, and how.

    Attributes:
        repo_id: names the repo in messages.
        revision: branch, tag or commit.
        variant: as in `model.fp16.safetensors`.
        include: patterns that replace the usual choice of files.
        exclude: patterns of files that are not taken.
        workers: threads.
        max_retries: of each piece, after its first try.
        is_offline: the user wants no network: an error of the store sends the pull to what is at the target.
        on_event: told what happens.
    """

    repo_id: str
    revision: str
    variant: str | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    workers: int
    max_retries: int
    is_offline: bool
    on_event: OnEvent

    @property
    def where(self) -> str:
        """The revision, for messages."""
        return f"{self.repo_id}@{self.revision}"

    def tell(self, kind: str, path: str = "", nbytes: int = 0, detail: str = "") -> None:
        """Tell of a step."""
        self.on_event(Event("pull", kind, path, nbytes, detail))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The revision as it was found: in the store, or, where that cannot be reached, at the target."""

    at: Revision
    listing: tuple[Entry, ...]
    selection: Selection
    offline: StoreError | None


def pull_from(store: Store, layout: Layout, request: Request) -> Path:
    """Bring the files of a revision to a target, checked, and show them whole.

    Returns:
        The folder that holds them.

    Raises:
        As `hubshard.pull`.
    """
    seen = _look(store, layout, request)

    def on_wait() -> None:
        request.tell("warning", detail=f"another pull works in {layout.private.parent}: waiting for it")

    with locked(layout.private / LOCK, on_wait=on_wait) as is_held:
        if not is_held:
            request.tell("warning", detail=f"{layout.private} takes no lock: let no other pull run there")
        request.tell("start", request.repo_id, seen.selection.nbytes, seen.at.commit)
        layout.begin(seen.at, seen.selection, seen.listing)
        content = _locate(layout, seen, request)
        missing = [entry for entry in seen.selection.files if entry.path not in content]
        if missing and seen.offline is not None:
            raise _incomplete(missing, request) from seen.offline
        for entry in seen.selection.files:
            if entry.path in content:
                check_safetensors(content[entry.path], entry, request.where)
        layout.protect(seen.selection, content)
        known = {name_of(content_id(entry)) for entry in seen.listing}
        with refused_by_disk(layout.private):
            layout.clean(known, {name_of(content_id(e)) for e in seen.selection.files if e.path in content})
        if missing:
            _fetch(store, layout, seen, request, missing, content)
        with refused_by_disk(layout.private):
            shown = layout.show(seen.at, seen.selection, seen.listing, content)
        request.tell("commit", str(shown), sum(entry.nbytes for entry in missing), seen.at.commit)
    return shown


def _look(store: Store, layout: Layout, request: Request) -> _Seen:
    """What the revision holds, and what of it is to be taken."""
    try:
        at = store.head(request.revision)
        if at is None:
            raise NotFoundError(
                f"{request.where}: there is no such branch, tag or commit", hint="correct the revision, or leave it out"
            )
        listing = tuple(store.list(at))
        transfer = Transfer(store, at, layout.private, 1, request.max_retries, request.on_event)
        selection = _select(listing, request, transfer.read)
    except StoreError as error:
        if not error.retryable and not request.is_offline:
            raise
        return _recall(layout, request, error)
    unknown = [entry.path for entry in selection.files if not can_verify(entry)]
    if unknown:
        raise IntegrityError(f"{request.where}: the server names no hash of {unknown[0]}: it cannot be checked")
    return _Seen(at, listing, selection, None)


def _recall(layout: Layout, request: Request, error: StoreError) -> _Seen:
    recalled = layout.recall(request.revision)
    if recalled is None:
        raise error

    def read_index(entry: Entry) -> bytes:
        try:
            return (recalled.folder / entry.path).read_bytes()
        except FileNotFoundError as missing:
            raise _incomplete([entry], request) from missing

    selection = _select(recalled.listing, request, read_index)
    used = f"using {recalled.folder}, commit {recalled.at.commit}"
    request.tell("warning", detail=f"the server cannot be reached ({error}): {used}")
    return _Seen(recalled.at, recalled.listing, selection, error)


def _select(listing: Sequence[Entry], request: Request, read_index: ReadIndex) -> Selection:
    selection = select(
        listing,
        variant=request.variant,
        include=request.include,
        exclude=request.exclude,
        read_index=read_index,
        where=request.where,
    )
    if request.include is not None:
        return selection
    pickled = only_pickled(listing, selection.files)
    if pickled:
        what = f"{listed(pickled, most=_SHOWN)}: not fetched, and no other weights of their folders are"
        request.tell("warning", detail=f"{what}: they are pickles, which may run code; name them in include")
    others = [entry.path for entry in selection.left_out if entry.path not in pickled]
    if others:
        what = "not fetched, since nothing that is fetched needs them"
        request.tell("note", detail=f"{what}: {listed(others, most=_SHOWN)}")
    return selection


def _locate(layout: Layout, seen: _Seen, request: Request) -> dict[str, Path]:
    """Where the content of files lies at the target already, right to the last byte: by path."""

    def look(entry: Entry) -> Path | None:
        hashed = Gathered(partial(request.tell, "hashed", entry.path))
        there = layout.candidates(seen.at, entry)
        found = next((path for path in there if matches(path, entry, on_bytes=hashed.add)), None)
        hashed.flush()
        return found

    found: dict[str, Path] = {}
    results = run(
        seen.selection.files, cost=lambda _: 1, work=look, budget_bytes=4 * request.workers, workers=request.workers
    )
    for entry, path in zip(seen.selection.files, results, strict=True):
        if path is not None:
            found[entry.path] = path
            request.tell("skipped", entry.path, entry.nbytes, "is there")
    return found


def _fetch(
    store: Store,
    layout: Layout,
    seen: _Seen,
    request: Request,
    missing: Sequence[Entry],
    content: dict[str, Path],
) -> None:
    """Fetch what is missing, each content once; notes in `content` where it is."""
    same = {content_id(entry): content[entry.path] for entry in seen.selection.files if entry.path in content}
    wanted = {content_id(entry): entry for entry in missing if content_id(entry) not in same}
    parts = layout.private / "parts"
    with refused_by_disk(parts):
        parts.mkdir(parents=True, exist_ok=True)
    _check_space(parts, wanted, request)
    lock = threading.Lock()

    def keep(entry: Entry, part: Part) -> None:
        check_safetensors(part.path, entry, request.where)
        with refused_by_disk(part.path):
            path = layout.keep(entry, part)
        with lock:
            same[content_id(entry)] = path

    transfer = Transfer(store, seen.at, parts, request.workers, request.max_retries, request.on_event)
    transfer.fetch(list(wanted.values()), keep)
    for entry in missing:
        if wanted.get(content_id(entry)) != entry:
            check_safetensors(same[content_id(entry)], entry, request.where)
            request.tell("skipped", entry.path, entry.nbytes, "has the content of another file")
    content |= {entry.path: same[content_id(entry)] for entry in missing}


def _check_space(parts: Path, wanted: Mapping[str, Entry], request: Request) -> None:
    need = sum(missing_bytes(parts, name_of(name), entry.nbytes) for name, entry in wanted.items())
    free = shutil.disk_usage(parts.parent).free
    if need > free:
        raise StoreError(
            f"{request.where}: the disk of {parts.parent} lacks {format_size(need - free)}: "
            f"{format_size(need)} are still to be fetched, {format_size(free)} are free",
            hint="free that much, or pull to another disk",
        )


def _incomplete(missing: Sequence[Entry], request: Request) -> IncompleteError:
    names = [entry.path for entry in missing]
    return IncompleteError(
        f"{request.where}: the server cannot be reached, and of the files at the target these are missing or damaged: "
        f"{listed(names, most=_SHOWN)}",
        hint="run it again when the server can be reached: it goes on from what has arrived",
    )
