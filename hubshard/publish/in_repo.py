"""What lies in the repo already, beside what is published: what is refused for it, and what is told of it.

All of this is asked of the commit that a publish builds on before a byte is sent, and again of each commit that takes
its place meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hubshard.errors import FormatError
from hubshard.messages import listed
from hubshard.names import (
    ADAPTER_STEM,
    is_consolidated,
    is_training_folder,
    is_weight_file,
    parse_weight_name,
    variant_of,
)
from hubshard.paths import case_key, file_and_folder, told_apart
from hubshard.protocols import Entry
from hubshard.publish.destination import Destination
from hubshard.publish.outgoing import Outgoing
from hubshard.sources.model_config import config_of
from hubshard.sources.model_index import MODEL_INDEX, components_of
from hubshard.store.content import sample_of

__all__ = ["check_tree", "notes_on_tree"]

_IGNORE = ".gitignore"
_SAMPLE_BYTES = 512


def check_tree(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> None:
    """Refuse what the repo refuses, what would be one with other files of it, and an adapter that would hide a model.

    Args:
        to: where the files go.
        outgoing: all that is to be published.
        tree: what is there now.

    Raises:
        FormatError: there is some of it.
    """
    _check_models(to, outgoing, tree)
    _check_case(to, outgoing, tree)
    _check_folders(to, outgoing, tree)
    _check_ignored(to, outgoing, tree)


def notes_on_tree(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> Sequence[str]:
    """Sentences for people: on weights that stay, and on an adapter that goes.

    Args:
        to: where the files go.
        outgoing: all that is to be published.
        tree: what is there now.
    """
    notes = (_note_on_adapter(to, outgoing, tree), _note_on_others(to, outgoing, tree))
    return [note for note in notes if note is not None]


def _check_models(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> None:
    """Refuse an adapter in a folder where a model lies: loaders would put it on its base, and not look at the model.

    So do transformers, whose models look for an adapter_config.json beside them first.
    """
    adapters = {folder for folder, stems in outgoing.stems.items() if stems == {ADAPTER_STEM}}
    models = [path for path in sorted(tree) if path.rpartition("/")[0] in adapters and _is_of_model(path)]
    if models:
        raise FormatError(
            f"{to.store.repo_id} holds a model where the adapter would lie, {listed(models)}: loaders would load the "
            "adapter on its base, and that model no longer",
            hint="publish the adapter to a repo of its own, or from a directory that holds it in a folder of its own; "
            "or remove the model first",
        )


def _is_of_model(path: str) -> bool:
    name = path.rpartition("/")[2]
    found = parse_weight_name(name)
    return is_consolidated(name) if found is None else found.stem != ADAPTER_STEM


def _check_ignored(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> None:
    """Refuse files that the repo's `.gitignore` refuses, all of them at once."""
    if _IGNORE not in tree:
        return
    planned = (shard for plan in outgoing.plans for shard in plan.shards)
    asked = {shard.path: (shard.nbytes, shard.header[:_SAMPLE_BYTES]) for shard in planned}
    asked |= {file.path: (file.nbytes, sample_of(file.data, _SAMPLE_BYTES)) for file in outgoing.files}
    advice = to.store.advice(to.base.branch, asked, create_pr=to.create_pr)
    refused = sorted(path for path, found in advice.items() if found.is_ignored)
    if refused:
        raise FormatError(
            f"{_IGNORE} of {to.store.repo_id} refuses {listed(refused)}",
            hint=f"change it there, or delete it with `hf repos delete-files {to.store.repo_id} {_IGNORE}`",
        )


def _check_case(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> None:
    """Refuse files whose names differ from those of files that stay in the repo only by case, or by Unicode's forms.

    On a disk without regard to case they would be one file, and no pull takes both.
    """
    ours = {case_key(file.path): file.path for file in outgoing.all_files}
    for path in sorted(tree):
        mine = ours.get(case_key(path), path)
        if mine != path and not outgoing.replaces(path):
            one, other, what = told_apart(mine, path)
            raise FormatError(
                f"{one}, and {other} in {to.store.repo_id}, are one file on a disk without regard to {what}",
                hint="delete or rename the one in the repo, or rename the one to publish",
            )


def _check_folders(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> None:
    """Refuse a file that would be a folder too: no repo takes it, nor, but for the case, does a disk."""
    staying = [path for path in tree if not outgoing.replaces(path)]
    found = file_and_folder([file.path for file in outgoing.all_files], staying)
    if found is not None:
        file, inside = found
        there = file if file in tree else inside
        raise FormatError(
            f"{file!r} would be a file and, for {inside!r}, a folder; {there!r} is in {to.store.repo_id}",
            hint="delete or rename the one in the repo, or rename the one to publish",
        )


def _note_on_adapter(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> str | None:
    ours = {file.path for file in outgoing.all_files}
    gone = [path for path in sorted(tree) if outgoing.hides(path) and path not in ours]
    if not gone:
        return None
    return (
        f"{to.store.repo_id}: {listed(gone)}: removed by the commit of this publish, since loaders would put that "
        "adapter on the model"
    )


def _note_on_others(to: Destination, outgoing: Outgoing, tree: Mapping[str, Entry]) -> str | None:
    """Of weights in the repo of which a publish knows nothing: of an earlier model, it may be.

    Folders of training checkpoints, and of components that the published pipeline names, are as they should be; and so
    are other variants in the folders of this one. Of a variant nothing is said: all others stay beside it.
    """
    if any(plan.variant for plan in outgoing.plans):
        return None
    components = _components_of(outgoing)
    kept: dict[str, list[str]] = {}
    for folder, path in _weights_by_folder(sorted(tree)):
        own = _is_own(outgoing, folder, path) if folder in outgoing.stems else folder in components
        if not own and not any(map(is_training_folder, folder.split("/"))):
            kept.setdefault(folder, []).append(path)
    if not kept:
        return None
    there = listed([folder or "the root" for folder in kept])
    named = (paths if folder in {"", *outgoing.stems} else [f"'{folder}/*'"] for folder, paths in kept.items())
    patterns = [pattern for of_folder in named for pattern in of_folder]
    if MODEL_INDEX in tree and not components and kept.keys() - {""}:  # of which nothing would be left
        patterns.append(MODEL_INDEX)
    return (
        f"{to.store.repo_id} keeps weights that this publish leaves alone in {there}: if they are of an earlier model, "
        f"delete them with `hf repos delete-files {to.store.repo_id} {' '.join(patterns)}`, or HfApi.delete_files"
    )


def _is_own(outgoing: Outgoing, folder: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    of_stems = (is_weight_file(name, variant=variant_of(name), stem=stem) for stem in outgoing.stems[folder])
    return outgoing.replaces(path) or any(of_stems)


def _weights_by_folder(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in paths:
        folder, _, name = path.rpartition("/")
        if parse_weight_name(name) is not None:
            yield folder, path


def _components_of(outgoing: Outgoing) -> set[str]:
    for file in outgoing.files:
        if file.path == MODEL_INDEX:
            return set(components_of(config_of(file.content(), path=MODEL_INDEX)))
    return set()
