"""Adapters (PEFT) that lie where a model was asked for: on which model they stand, and their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hubshard.errors import FormatError, StoreError
from hubshard.messages import named
from hubshard.names import ADAPTER_STEM, shard_name
from hubshard.paths import path_in
from hubshard.sizes import READ_BYTES
from hubshard.sources.model_config import ADAPTER_CONFIG, CONFIG, config_of, read_config
from hubshard.store.opening import Opened, open_target
from hubshard.target import RepoTarget, parse_target

__all__ = ["Adapter", "find_adapter"]

_FILES = (ADAPTER_CONFIG, shard_name(1, 1, stem=ADAPTER_STEM))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was found.

    Attributes:
        base: the model that it stands on; None for the one in the same folder.
        opened: where its files are.
        prefix: of their paths there.
        path: their folder on this machine, or None.
    """

    base: str | None
    opened: Opened | None
    prefix: str
    path: Path | None

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder with its files: its own, or one that is there as long as this lasts."""
        if self.path is not None or self.opened is None:
            yield self.path or Path()
            return
        with TemporaryDirectory(prefix="hubshard-") as scratch:
            for entry in self.opened.store.list(self.opened.at):
                if entry.path.removeprefix(self.prefix) in _FILES and entry.path.startswith(self.prefix):
                    with (Path(scratch) / entry.path.removeprefix(self.prefix)).open("wb") as file:
                        for block in self.opened.blocks(entry.path, entry.nbytes, block_bytes=READ_BYTES):
                            file.write(block)
            yield Path(scratch)


def find_adapter(
    source: object, *, revision: str | None, subfolder: str, token: str | bool | None, endpoint: str | None
) -> Adapter | None:
    """The adapter in a folder or repo, as transformers would take it: not without peft, which must load it.

    A folder that holds a model too is that model with the adapter; a repo stands for the model that its adapter names.

    Raises:
        FormatError: its config names no model.
    """
    if find_spec("peft") is None or not isinstance(source, (str, os.PathLike)):
        return None
    target = parse_target(source if isinstance(source, str) else Path(source))
    if not isinstance(target, RepoTarget):
        folder = target / subfolder
        if not (folder / ADAPTER_CONFIG).is_file():
            return None
        own = (folder / CONFIG).is_file()
        with named(str(folder)):
            base = None if own else _base(config_of((folder / ADAPTER_CONFIG).read_bytes(), path=ADAPTER_CONFIG))
        return Adapter(base, None, "", folder)
    try:
        opened = open_target(source, revision=revision, token=token, endpoint=endpoint)
    except StoreError:  # no network: what is in the cache is a model
        return None
    prefix = path_in(subfolder, "")
    for entry in opened.store.list(opened.at):
        if entry.path == prefix + ADAPTER_CONFIG:
            with named(target.repo_id):
                return Adapter(_base(read_config(opened.store, opened.at, entry)), opened, prefix, None)
    return None


def _base(config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise FormatError(
            f"{ADAPTER_CONFIG} names no model that the adapter stands on",
            hint="load that model, then model.load_adapter(...)",
        )
    return base
