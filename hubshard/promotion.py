"""`promote`: the model of a saved training step becomes what a repo shows."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hubshard.errors import FormatError, NotFoundError
from hubshard.events import OnEvent, ignore
from hubshard.messages import listed
from hubshard.names import check_variant, parse_weight_name
from hubshard.paths import check_plain_path
from hubshard.protocols import Revision
from hubshard.publish.along import beside_weights
from hubshard.publish.delivery import Delivery, Published, deliver
from hubshard.publish.left_out import Choice
from hubshard.publish.outgoing import Layout, OutFile, Outgoing, from_memory
from hubshard.readers import read_bytes
from hubshard.sizes import parse_size
from hubshard.sources.dtypes import CASTABLE, parse_float_dtype
from hubshard.sources.model_config import CONFIG, config_of, config_with_dtype, read_config, stem_for
from hubshard.steps.source import MODEL_PART, StepSource, open_step
from hubshard.store.hub import HubStore
from hubshard.store.hub_client import Token
from hubshard.store.opening import Opened, open_target
from hubshard.store.patience import Patience
from hubshard.target import check_repo_id, check_revision

__all__ = ["Promoted", "promote"]

_DISTRIBUTED = "module."  # what DistributedDataParallel puts before every name
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.py", "*.spm", "*.tiktoken", "*.txt")  # of a folder
_NO_COMPANIONS = ("README.md", "*.index.json", "*.index.*.json")  # an index names weights, which stay
_MOST_NAMED = 5


@dataclass(frozen=True)
class Promoted(Published):
    """What a promote did.

    Attributes:
        step: the step whose model it is.
        read_from: where the step lies.
        read_bytes: bytes that were fetched of it.
    """

    step: int = 0
    read_from: str = ""
    read_bytes: int = 0


def promote(
    repo_id: str,
    *,
    step: int | None = None,
    part: str = MODEL_PART,
    branch: str = "resume",
    resume_repo_id: str | None = None,
    local_dir: str | os.PathLike[str] | None = None,
    revision: str = "main",
    max_shard_size: int | str = "5GB",
    variant: str | None = None,
    dtype: Any = None,
    tag: str | None = None,
    move_tag: bool = False,
    private: bool | None = None,
    create_pr: bool = False,
    expected_head: str | None = None,
    message: str | None = None,
    companions: Sequence[object] | str | os.PathLike[str] = (),
    staging: Literal["branch", "none"] = "branch",
    staging_batch_size: int | str = "256MB",
    scratch: str | Path | None = None,
    streams: int | None = None,
    dry_run: bool = False,
    token: Token = None,
    endpoint: str | None = None,
    max_retries: int = 5,
    stall_seconds: float = 30.0,
    on_event: OnEvent = ignore,
) -> Promoted:
    """Publish the model of a saved training step, in one commit that readers see whole or not at all.

    The step is read by ranges, each checked with the hash that was written with it, and goes straight up: no torch, no
    training machine, no scratch files, whatever ranks had saved it. All else is as in `push_to_hub`: a run that was
    killed goes on from its finished shards, the same bytes again are no commit, stale weight files go.

    Configs and tokenizers that the repo has stay as they are, except that a config tells of a new `dtype`,
    unless a variant is named.

    Args:
        repo_id: "org/name", the repo that is to show the model; made if it does not exist.
        step: number of the step; None for the newest that is whole.
        part: the key of the saved state under which the tensors are, with more after dots where only names that go on
            so are meant: "ema" of a `TrainState`, "model.module" of a state taken from DistributedDataParallel; "" for
            all tensors. The files have the names without it.
        branch: holds the steps; a tag or a commit will do.
        resume_repo_id: the repo that holds them; None for `repo_id`.
        local_dir: a folder of steps to read from, instead of a repo; whether their branch was rolled back is not looked
            at.
        revision: branch to publish to; made from main if it does not exist.
        max_shard_size: as in `push_to_hub`, like all that follows.
        variant: see there.
        dtype: see there; needs torch.
        tag: see there.
        move_tag: see there.
        private: see there.
        create_pr: see there.
        expected_head: see there.
        message: title of the commit; by default it names the step.
        companions: configs, tokenizers, processors to go along; or a directory, or `org/name[@revision]` of another
            repo, whose small files do, its model card left out. One such place needs no list around it.
        staging: see there.
        staging_batch_size: see there.
        scratch: see there; saves a second download where Xet is off, or where shards of the same sizes are replaced.
        streams: see there.
        dry_run: plan and check only, as in `push_to_hub`; of the step, the manifest is read.
        token: of both repos.
        endpoint: see there.
        max_retries: see there.
        stall_seconds: see there.
        on_event: see there.

    Raises:
        NotFoundError: no such step, or nothing in that part of it: says what there is.
        IncompleteError, IntegrityError: the step is not whole, or not as it was saved; nothing is shown.
        FormatError, ConflictError, StoreError: as in `push_to_hub`.
    """
    check_variant(variant)
    check_revision(branch)
    if resume_repo_id is not None:
        check_repo_id(resume_repo_id)
    layout = Layout(parse_size(max_shard_size), variant, None if dtype is None else parse_float_dtype(dtype))
    if local_dir is not None and resume_repo_id is not None:
        raise FormatError(f"steps lie in {local_dir} or in {resume_repo_id}, not in both", hint="leave one out")
    if local_dir is None and (resume_repo_id or repo_id, branch) == (repo_id, revision):
        raise FormatError(
            f"{revision!r} holds the steps, and would be published to", hint="name another revision, such as main"
        )
    to = Delivery(
        repo_id=repo_id,
        revision=revision,
        tag=tag,
        move_tag=move_tag,
        private=private,
        create_pr=create_pr,
        expected_head=expected_head,
        message=message,
        staging=staging,
        staging_batch_size=staging_batch_size,
        scratch=scratch,
        streams=streams,
        dry_run=dry_run,
        token=token,
        endpoint=endpoint,
        max_retries=max_retries,
        stall_seconds=stall_seconds,
        on_event=on_event,
    )
    sources: list[StepSource] = []

    def collect(patience: Patience) -> Outgoing:
        home = resume_repo_id or repo_id
        store = None if local_dir is not None else HubStore(home, token=token, endpoint=endpoint, patience=patience)
        opened = open_step(store, step=step, branch=branch, where=home, local_dir=local_dir)
        sources.append(StepSource(opened, part))
        given = [companions] if isinstance(companions, str | os.PathLike) else companions
        objects = [each for each in given if not isinstance(each, str | os.PathLike)]
        places = [
            open_target(each, token=token, endpoint=endpoint, patience=patience)
            for each in given
            if isinstance(each, str | os.PathLike)
        ]
        target = _Target.of(to, patience)
        outgoing = from_memory(sources[0], layout, companions=objects, stem=_stem(sources[0], places, target))
        for place in places:
            outgoing = _joined(outgoing, place)
        return _outgoing(sources[0], layout, outgoing, target)

    published = deliver(to, collect)
    (source,) = sources
    common = {field.name: getattr(published, field.name) for field in fields(Published)}
    return Promoted(
        **common,
        step=source.opened.step.step,
        read_from=source.opened.folder.where,
        read_bytes=source.nbytes_read,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    # the small files that the repo has already, and a way to read one
    store: HubStore
    at: Revision | None
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, to: Delivery, patience: Patience) -> _Target:
        store = HubStore(to.repo_id, token=to.token, endpoint=to.endpoint, patience=patience)
        try:
            at = store.head(to.revision) or store.head("main")
        except NotFoundError:  # it will be made
            at = None
        return cls(store, at, {} if at is None else {entry.path: entry.nbytes for entry in store.list(at)})

    def read(self, path: str) -> bytes | None:
        nbytes = self.sizes.get(path)
        if self.at is None or nbytes is None:
            return None
        return read_bytes(self.store, self.at, path, 0, nbytes)


def _stem(source: StepSource, places: Sequence[Opened], target: _Target) -> str:
    """The stem that the loader looks for which the config of the model is for, where there is one."""
    for place in places:
        for entry in place.store.list(place.at):
            if entry.path == CONFIG and place.path is None:
                with place.named():
                    return stem_for(read_config(place.store, place.at, entry))
    for file in _saved_files(source):
        if file.path == CONFIG:
            return stem_for(config_of(file.content()))
    with suppress(FormatError):  # what the repo shows now is not ours to judge
        return stem_for(config_of(target.read(CONFIG) or b"{}"))
    return stem_for({})


def _joined(outgoing: Outgoing, companion: Opened) -> Outgoing:
    """What goes out, and the small files of a folder or repo besides."""
    if companion.path is not None:
        raise FormatError(f"{companion.path}: config and tokenizer are taken from a folder", hint="name the folder")
    choice = Choice(_COMPANIONS, _NO_COMPANIONS)
    files, _ = beside_weights(companion, companion.store.list(companion.at), choice)
    if not files:
        raise NotFoundError(f"{companion.where} holds no config or tokenizer", hint="name another companion")
    twice = {file.path for file in files} & {file.path for file in outgoing.files if not file.default}
    if twice:
        raise FormatError(f"{companion.where}: another companion brings {listed(sorted(twice))} too")
    return replace(outgoing, files=(*outgoing.files, *files))


def _outgoing(source: StepSource, layout: Layout, outgoing: Outgoing, target: _Target) -> Outgoing:
    files = {file.path: file for file in (*_saved_files(source), *outgoing.files)}
    if layout.config_dtype is not None:
        config = files.get(CONFIG)
        raw = target.read(CONFIG) if config is None or config.default else None
        if raw is None and config is not None:
            raw = config.content()
        changed = None if raw is None else config_with_dtype(raw, CASTABLE[layout.config_dtype])
        if changed is not None and changed is not raw:
            files[CONFIG] = OutFile.of(CONFIG, changed)
    notes = (*outgoing.notes, *_notes(source, files.keys() | target.sizes.keys()))
    title = f"Promote step {source.opened.step.step}"  # and no more: the repo or folder may be nobody else's business
    return replace(outgoing, files=tuple(files.values()), notes=notes, title=title)


def _saved_files(source: StepSource) -> Iterator[OutFile]:
    """Files that whoever saved the step put into its metadata, for a repo that lacks them."""
    saved = source.opened.step.metadata.get("files")
    for path, content in saved.items() if isinstance(saved, dict) else ():
        if isinstance(path, str) and isinstance(content, str | bytes):
            check_plain_path(path, path=source.opened.folder.where)
            if parse_weight_name(path) is not None:
                raise FormatError(f"{source.opened.folder.where}: its metadata brings the weight file {path}")
            yield OutFile.of(path, content.encode() if isinstance(content, str) else content, default=True)


def _notes(source: StepSource, paths: Container[str]) -> Iterator[str]:
    names = [*(spec.name for spec in source.specs()), *source.aliases()]
    if source.left_out:
        yield f"no tensors, so they stay in the step: {listed(list(source.left_out), most=_MOST_NAMED)}"
    if all(name.startswith(_DISTRIBUTED) for name in names):
        part = f"{source.part}.module" if source.part else "module"
        yield f"all names begin with {_DISTRIBUTED!r}, as DistributedDataParallel saves them: is part={part!r} meant?"
    if CONFIG not in paths:
        todo = "name a folder that has one with --companions (in Python, companions=)"
        yield f"the repo has no {CONFIG}, which transformers asks for: {todo}"
