"""Any sequence of commits to a store leaves what the same sequence leaves in a dictionary."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hubshard.errors import ConflictError, IntegrityError, NotFoundError
from hubshard.protocols import Revision, Staged, Store
from hubshard.store.hub import HubStore
from hubshard.store.local import LocalStore

if TYPE_CHECKING:
    from tests.conftest import Hub

PATHS = st.sampled_from(["a.json", "b.safetensors", "c/a.json", "c/d.safetensors", "c/e/f.bin", "ü/ö.txt"])
CONTENTS = st.binary(max_size=40) | st.integers(0, 3).map(lambda seed: random.Random(seed).randbytes(200_000))
SETTINGS = settings(
    max_examples=12, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


class Model(RuleBasedStateMachine):
    """A store beside a dictionary of what it should hold."""

    store: Store
    branch: ClassVar[str]
    ignored: ClassVar[set[str]] = set()
    head: Revision | None = None

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.staged: dict[str, tuple[Staged, bytes]] = {}
        self.older: list[tuple[Revision, dict[str, bytes]]] = []
        self.count = 0

    @rule(path=PATHS, content=CONTENTS, knows_hash=st.booleans())
    def stage(self, path: str, content: bytes, knows_hash: bool) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        known = sha256 if knows_hash else None
        staged = self.store.stage(self.branch, path, lambda: [content], nbytes=len(content), sha256=known)
        assert (staged.path, staged.nbytes, staged.sha256) == (path, len(content), sha256)
        self.staged[path] = staged, content

    @rule(path=PATHS, content=st.binary(min_size=1, max_size=40))
    def stage_what_is_not_as_promised(self, path: str, content: bytes) -> None:
        with pytest.raises(IntegrityError):
            self.store.stage(self.branch, path, lambda: [content], nbytes=len(content), sha256="ab" * 32)

    @rule(remove=st.lists(PATHS, max_size=3))
    def commit(self, remove: Sequence[str]) -> None:
        parent = self.head
        self.head = self._commit(parent, remove)
        assert self.head != parent or not (self.staged or set(remove) & set(self.files))
        if parent is not None:
            self.older.append((parent, dict(self.files)))
        self.files = {path: content for path, content in self.files.items() if path not in remove}
        self.files |= {path: content for path, (_, content) in self.staged.items()}
        self.staged = {}

    @precondition(lambda self: self.older)
    @rule(data=st.data())
    def commit_on_a_stale_parent(self, data: st.DataObject) -> None:
        stale, _ = data.draw(st.sampled_from(self.older))
        if stale != self.head:
            with pytest.raises(ConflictError):
                self._commit(stale, [])

    @precondition(lambda self: self.older)
    @rule(data=st.data())
    def read_an_older_revision(self, data: st.DataObject) -> None:
        at, files = data.draw(st.sampled_from(self.older))
        try:
            found = self._read(at)
        except NotFoundError:
            assert isinstance(self.store, LocalStore)
        else:
            assert found == files

    @invariant()
    def holds_what_the_dictionary_holds(self) -> None:
        assert self.store.head(self.branch) == self.head
        if self.head is not None:
            assert self._read(self.head) == self.files

    def _commit(self, parent: Revision | None, remove: Sequence[str]) -> Revision:
        self.count += 1
        return self.store.commit(
            self.branch,
            parent=parent,
            add=[staged for staged, _ in self.staged.values()],
            remove=remove,
            message=f"commit {self.count}",
            publish_id=f"id-{self.count}",
        )

    def _read(self, at: Revision) -> dict[str, bytes]:
        found = {}
        for entry in self.store.list(at):
            if entry.path not in self.ignored:
                into = bytearray(entry.nbytes)
                self.store.read(at, entry.path, 0, entry.nbytes, memoryview(into))
                found[entry.path] = bytes(into)
        return found


def test_a_directory_behaves_as_a_dictionary() -> None:
    class Local(Model):
        branch = "main"

        def __init__(self) -> None:
            super().__init__()
            self.folder = tempfile.TemporaryDirectory()
            self.store = LocalStore(Path(self.folder.name) / "model")

        def teardown(self) -> None:
            self.folder.cleanup()

    run_state_machine_as_test(Local, settings=SETTINGS)


def test_a_repo_behaves_as_a_dictionary(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))

    class Remote(Model):
        branch = "work"
        ignored: ClassVar[set[str]] = {".gitattributes"}
        repos = 0

        def __init__(self) -> None:
            super().__init__()
            Remote.repos += 1
            store = HubStore(f"org/repo-{Remote.repos}", endpoint=hub.url, token="hf_test", xet=Remote.repos % 2 == 0)
            store.create_repo()
            self.store = store

    run_state_machine_as_test(Remote, settings=SETTINGS)
