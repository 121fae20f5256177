"""Where a publish goes: a branch of a repo, as it was found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hubshard.protocols import Entry, Revision
from hubshard.store.hub import HubStore

__all__ = ["Destination", "by_path"]


@dataclass(frozen=True, slots=True)
class Destination:
    """A branch that is published to.

    Attributes:
        store: the repo.
        revision: the branch.
        base: the commit to build on.
        create_pr: a pull request is opened, and the branch stays where it is.
        key: what all publishes of the same plan to this branch have in common; see `publish_key`.
    """

    store: HubStore
    revision: str
    base: Revision
    create_pr: bool
    key: str

    def tree(self, at: Revision | None = None) -> Mapping[str, Entry]:
        """The files of a revision, or of the base, by path."""
        return by_path(self.store.list(at or self.base))


def by_path(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by their paths."""
    return {entry.path: entry for entry in entries}
