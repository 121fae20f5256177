"""What every `Store` promises. A new one adds a subclass of `StoreContract` here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hubshard.errors import ConflictError, FormatError, HubshardError, IntegrityError, NotFoundError
from hubshard.protocols import Revision, Staged, Store
from hubshard.store.hub import HubStore
from hubshard.store.local import LocalStore

if TYPE_CHECKING:
    from tests.conftest import Hub

WEIGHTS = random.Random(0).randbytes(3_000_000)
CONFIG = b'{"hidden_size": 8}\n'
PRESENT_BEFORE = {".gitattributes"}
"""A new branch on the Hub starts with this file."""


class StoreContract:
    """The suite; a subclass says how to open a store, where `branch` does not exist yet."""

    branch = "main"

    def open(self) -> Store:
        """The store under test, as another process would open it."""
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Store:
        return self.open()

    # What the tests do with it

    def stage(self, store: Store, path: str, content: bytes) -> Staged:
        return store.stage(self.branch, path, lambda: pieces(content), nbytes=len(content))

    def commit(
        self, store: Store, parent: Revision | None, files: dict[str, bytes], remove: tuple[str, ...] = ()
    ) -> Revision:
        add = [self.stage(store, path, content) for path, content in files.items()]
        publish_id = f"id-{random.getrandbits(64):x}"
        return store.commit(
            self.branch, parent=parent, add=add, remove=remove, message="Title\n\nBody", publish_id=publish_id
        )

    def files(self, store: Store, at: Revision) -> dict[str, bytes]:
        return {
            entry.path: read(store, at, entry.path, 0, entry.nbytes)
            for entry in store.list(at)
            if entry.path not in PRESENT_BEFORE
        }

    # What is promised

    def test_a_branch_that_is_not_there_has_no_head(self, store: Store) -> None:
        assert store.head(self.branch) is None

    def test_a_commit_shows_its_files_to_whoever_opens_the_store(self, store: Store) -> None:
        made = self.commit(store, None, {"model.safetensors": WEIGHTS, "a/b/config.json": CONFIG})
        other = self.open()
        assert made.branch == self.branch
        assert other.head(self.branch) == made
        assert self.files(other, made) == {"model.safetensors": WEIGHTS, "a/b/config.json": CONFIG}

    def test_a_commit_id_is_its_own_head(self, store: Store) -> None:
        made = self.commit(store, None, {"config.json": CONFIG})
        assert store.head(made.commit) == Revision(made.commit, made.commit)
        assert store.head("0" * 40) is None

    def test_entries_are_sorted_and_tell_size_and_hash(self, store: Store) -> None:
        made = self.commit(store, None, {"z.safetensors": WEIGHTS, "a.safetensors": WEIGHTS, "b/c.json": CONFIG})
        entries = {entry.path: entry for entry in store.list(made)}
        assert list(entries) == sorted(entries)
        assert entries["b/c.json"].nbytes == len(CONFIG)
        assert entries["a.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
        assert entries["a.safetensors"].blob_id == entries["z.safetensors"].blob_id != entries["b/c.json"].blob_id

    def test_a_staged_file_is_the_same_as_its_entry(self, store: Store) -> None:
        staged = [self.stage(store, "m.safetensors", WEIGHTS), self.stage(store, "config.json", CONFIG)]
        made = store.commit(self.branch, parent=None, add=staged, remove=[], message="m", publish_id="p")
        entries = {entry.path: entry for entry in store.list(made)}
        assert all(file.is_same(entries[file.path]) for file in staged)
        assert not staged[0].is_same(entries["config.json"])

    @pytest.mark.parametrize(
        ("start", "stop"),
        [
            (0, 1),
            (0, 0),
            (7, 7),
            (1, 2),
            (65_535, 65_537),
            (1_000_001, 2_000_003),
            (2_999_999, 3_000_000),
            (0, 3_000_000),
        ],
    )
    def test_a_read_fills_exactly_what_was_asked_for(self, store: Store, start: int, stop: int) -> None:
        made = self.commit(store, None, {"m.safetensors": WEIGHTS})
        around = bytearray(b"\xaa" * (stop - start + 20))
        store.read(made, "m.safetensors", start, stop, memoryview(around)[10 : 10 + stop - start])
        assert around == b"\xaa" * 10 + WEIGHTS[start:stop] + b"\xaa" * 10

    def test_a_read_past_the_end_is_an_error(self, store: Store) -> None:
        made = self.commit(store, None, {"m.safetensors": WEIGHTS, "c.json": CONFIG})
        for path, nbytes in (("m.safetensors", len(WEIGHTS)), ("c.json", len(CONFIG))):
            for start, stop in ((nbytes - 1, nbytes + 1), (nbytes, nbytes + 1), (nbytes + 9, nbytes + 10)):
                with pytest.raises(IntegrityError, match=path):
                    read(store, made, path, start, stop)

    def test_a_missing_file_or_revision_is_named(self, store: Store) -> None:
        made = self.commit(store, None, {"c.json": CONFIG})
        with pytest.raises(NotFoundError, match=r"nope\.bin"):
            read(store, made, "nope.bin", 0, 1)
        gone = Revision(self.branch, "1" * 40)
        with pytest.raises(NotFoundError):
            store.list(gone)
        with pytest.raises(NotFoundError):
            read(store, gone, "c.json", 0, 1)

    def test_many_threads_read_at_once(self, store: Store) -> None:
        made = self.commit(store, None, {"m.safetensors": WEIGHTS})
        starts = range(0, len(WEIGHTS), 100_000)
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda start: read(store, made, "m.safetensors", start, start + 100_000), starts))
        assert b"".join(parts) == WEIGHTS

    def test_staged_content_is_invisible_until_a_commit_names_it(self, store: Store) -> None:
        made = self.commit(store, None, {"c.json": CONFIG})
        self.stage(store, "m.safetensors", WEIGHTS)
        assert store.head(self.branch) == made
        assert self.files(self.open(), made) == {"c.json": CONFIG}

    def test_a_commit_adds_replaces_and_removes_at_once(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1", "b.json": b"2", "c/d.json": b"3"})
        second = self.commit(store, first, {"a.json": b"10", "e.json": b"5"}, remove=("b.json", "c/d.json"))
        assert second != first
        assert self.files(store, second) == {"a.json": b"10", "e.json": b"5"}

    def test_a_path_to_remove_that_is_not_there_is_left_out(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        second = self.commit(store, first, {"b.json": b"2"}, remove=("nope.json", "a", "x/y.bin"))
        assert self.files(store, second) == {"a.json": b"1", "b.json": b"2"}

    def test_a_path_that_is_added_and_removed_is_added(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        assert self.files(store, self.commit(store, first, {"a.json": b"2"}, remove=("a.json",))) == {"a.json": b"2"}

    def test_a_revision_that_was_followed_is_whole_or_gone(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1", "b.json": b"1"})
        self.commit(store, first, {"a.json": b"2"}, remove=("b.json",))
        try:
            seen = self.files(self.open(), first)
        except NotFoundError:
            return
        assert seen == {"a.json": b"1", "b.json": b"1"}

    def test_a_stale_parent_is_a_conflict_and_changes_nothing(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        second = self.commit(store, first, {"a.json": b"2"})
        with pytest.raises(ConflictError) as caught:
            self.commit(store, first, {"a.json": b"3"})
        assert caught.value.hint
        assert store.head(self.branch) == second
        assert self.files(store, second) == {"a.json": b"2"}

    def test_a_branch_that_exists_is_not_made_again(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        with pytest.raises(ConflictError):
            self.commit(store, None, {"a.json": b"2"})
        assert store.head(self.branch) == first

    def test_of_many_writers_at_once_one_wins(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"0"})

        def write(number: int) -> Revision | None:
            try:
                return self.commit(self.open(), first, {f"w{number}.json": b"%d" % number})
            except ConflictError:
                return None

        with ThreadPoolExecutor(4) as pool:
            made = [revision for revision in pool.map(write, range(4)) if revision is not None]
        assert [store.head(self.branch)] == made
        assert len(self.files(store, made[0])) == 2

    def test_content_that_is_not_as_promised_is_refused(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        wrong = "0" * 64
        for path, content in (("m.safetensors", WEIGHTS), ("c.json", CONFIG)):
            for nbytes, sha256 in ((len(content) - 1, None), (len(content) + 1, None), (len(content), wrong)):
                with pytest.raises(IntegrityError, match=path):
                    store.stage(self.branch, path, lambda: pieces(content), nbytes=nbytes, sha256=sha256)  # noqa: B023
        assert store.head(self.branch) == first
        assert self.files(store, self.commit(store, first, {"c.json": CONFIG})) == {"a.json": b"1", "c.json": CONFIG}

    def test_content_that_breaks_off_leaves_the_store_as_it_was(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})

        def broken() -> Iterator[bytes]:
            yield WEIGHTS[:1_000_000]
            raise ArithmeticError("the disk of the source")

        with pytest.raises(ArithmeticError, match="the disk of the source"):
            store.stage(self.branch, "m.safetensors", broken, nbytes=len(WEIGHTS))
        assert store.head(self.branch) == first
        made = self.commit(store, first, {"m.safetensors": WEIGHTS})
        assert self.files(store, made) == {"a.json": b"1", "m.safetensors": WEIGHTS}

    def test_content_may_be_a_file_and_buffers_of_any_kind(self, store: Store, tmp_path: Path) -> None:
        file = tmp_path / "source.bin"
        file.write_bytes(WEIGHTS)
        from_file = store.stage(self.branch, "f.safetensors", file, nbytes=len(WEIGHTS))
        buffer = bytearray(1_000_000)

        def reused() -> Iterator[memoryview]:
            for start in range(0, len(WEIGHTS), len(buffer)):
                buffer[:] = WEIGHTS[start : start + len(buffer)]
                yield memoryview(buffer)

        from_buffer = store.stage(self.branch, "b.safetensors", reused, nbytes=len(WEIGHTS))
        made = store.commit(
            self.branch, parent=None, add=[from_file, from_buffer], remove=[], message="m", publish_id="p"
        )
        assert self.files(store, made) == {"f.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}

    def test_a_known_hash_changes_nothing_in_what_is_staged(self, store: Store) -> None:
        for path, content in (("m.safetensors", WEIGHTS), ("c.json", CONFIG)):
            sha256 = hashlib.sha256(content).hexdigest()
            staged = store.stage(self.branch, path, lambda: pieces(content), nbytes=len(content), sha256=sha256)  # noqa: B023
            assert (staged.path, staged.nbytes, staged.sha256) == (path, len(content), sha256)
            assert staged.nbytes_sent >= len(content) // 2
            assert self.stage(store, path, content).sha256 == sha256

    def test_content_that_is_staged_is_not_sent_again(self, store: Store) -> None:
        sha256 = self.stage(store, "m.safetensors", WEIGHTS).sha256
        self.commit(store, None, {"c.json": CONFIG, "m.safetensors": WEIGHTS})
        again = [self.stage(store, "m.safetensors", WEIGHTS).sha256]
        again += [
            store.stage(self.branch, path, lambda: pieces(WEIGHTS), nbytes=len(WEIGHTS), sha256=sha256).sha256
            for path in ("m.safetensors", "other.safetensors")
        ]
        later = store.stage(self.branch, "n.safetensors", lambda: pieces(WEIGHTS), nbytes=len(WEIGHTS), sha256=sha256)
        assert again == [sha256] * 3
        assert later.nbytes_sent == 0

    def test_what_is_staged_travels_as_json_to_another_process(self, store: Store) -> None:
        staged = [self.stage(store, "m.safetensors", WEIGHTS), self.stage(store, "c.json", CONFIG)]
        text = json.dumps([dataclasses.asdict(file) for file in staged])
        other = self.open()
        add = [Staged(**fields) for fields in json.loads(text)]
        made = other.commit(self.branch, parent=None, add=add, remove=[], message="m", publish_id="p")
        assert self.files(store, made) == {"m.safetensors": WEIGHTS, "c.json": CONFIG}

    def test_content_that_a_revision_holds_needs_no_receipt(self, store: Store) -> None:
        first = self.commit(store, None, {"m.safetensors": WEIGHTS})
        named = Staged("copy/n.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
        second = self.open().commit(
            self.branch, parent=first, add=[named], remove=["m.safetensors"], message="m", publish_id="p"
        )
        assert self.files(store, second) == {"copy/n.safetensors": WEIGHTS}

    def test_content_that_nobody_holds_is_refused_without_a_receipt(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        named = Staged("m.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
        with pytest.raises(HubshardError):
            store.commit(self.branch, parent=first, add=[named], remove=[], message="m", publish_id="p")
        assert store.head(self.branch) == first

    def test_one_content_at_two_paths_makes_two_files(self, store: Store) -> None:
        made = self.commit(store, None, {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS})
        assert self.files(store, made) == {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}

    def test_empty_files_are_files(self, store: Store) -> None:
        made = self.commit(store, None, {"empty.safetensors": b"", "empty.txt": b"", "c.json": CONFIG})
        assert self.files(store, made) == {"empty.safetensors": b"", "empty.txt": b"", "c.json": CONFIG}

    def test_many_files_make_one_commit(self, store: Store) -> None:
        files = {f"part/{number:03}.json": b"%d" % number for number in range(120)}
        first = self.commit(store, None, {"c.json": CONFIG})
        with ThreadPoolExecutor(8) as pool:
            add = list(pool.map(lambda path: self.stage(store, path, files[path]), files))
        made = store.commit(self.branch, parent=first, add=add, remove=["c.json"], message="m", publish_id="p")
        assert self.files(store, made) == files

    def test_large_files_are_staged_by_several_threads(self, store: Store) -> None:
        files = {f"m{number}.safetensors": random.Random(number).randbytes(2_000_000) for number in range(1, 4)}
        with ThreadPoolExecutor(3) as pool:
            add = list(pool.map(lambda path: self.stage(store, path, files[path]), files))
        made = store.commit(self.branch, parent=None, add=add, remove=[], message="m", publish_id="p")
        assert self.files(store, made) == files

    def test_names_with_spaces_and_letters_of_any_alphabet(self, store: Store) -> None:
        files = {"größe/模型 #1?.safetensors": WEIGHTS, "a b/100%.json": CONFIG, "x/+&=;.json": CONFIG}
        assert self.files(store, self.commit(store, None, files)) == files

    @pytest.mark.parametrize(
        "path", ["", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\\b", "C:/a", "C:", "a\0b", "a\nb", ".git/config"]
    )
    def test_a_path_that_leads_out_or_nowhere_is_refused(self, store: Store, path: str) -> None:
        first = self.commit(store, None, {"a.json": b"1"})
        with pytest.raises(FormatError):
            self.stage(store, path, CONFIG)
        staged = dataclasses.replace(self.stage(store, "b.json", CONFIG), path=path)
        with pytest.raises(FormatError):
            store.commit(self.branch, parent=first, add=[staged], remove=[], message="m", publish_id="p")
        assert store.head(self.branch) == first

    def test_a_file_cannot_be_a_folder_too(self, store: Store) -> None:
        first = self.commit(store, None, {"a.json": b"1", "d/e.json": b"2"})
        for path in ("a.json/b.json", "d"):
            with pytest.raises(HubshardError):
                self.commit(store, first, {path: CONFIG})
        assert store.head(self.branch) == first

    def test_a_folder_may_become_a_file_in_one_commit(self, store: Store) -> None:
        first = self.commit(store, None, {"d/e.json": b"2"})
        assert self.files(store, self.commit(store, first, {"d": CONFIG}, remove=("d/e.json",))) == {"d": CONFIG}


def pieces(content: bytes) -> Iterator[bytes]:
    """Content in uneven pieces, some of them empty."""
    start, size = 0, 1
    while start < len(content):
        yield content[start : start + size]
        yield b""
        start, size = start + size, 3 * size + 1


def read(store: Store, at: Revision, path: str, start: int, stop: int) -> bytes:
    into = bytearray(stop - start)
    store.read(at, path, start, stop, memoryview(into))
    return bytes(into)


class TestLocalDirectory(StoreContract):
    @pytest.fixture(autouse=True)
    def _where(self, tmp_path: Path) -> None:
        self.root = tmp_path / "parent" / "model"

    def open(self) -> Store:
        return LocalStore(self.root)


class HubContract(StoreContract):
    branch = "work/1"
    xet: bool

    @pytest.fixture(autouse=True)
    def _repo(self, module_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
        self.url = module_hub.url
        self.repo_id = f"org/repo-{random.getrandbits(64):x}"
        self.open().create_repo()

    def open(self) -> HubStore:
        return HubStore(self.repo_id, endpoint=self.url, token="hf_test", xet=self.xet)


class TestHubWithXet(HubContract):
    xet = True


class TestHubWithoutXet(HubContract):
    xet = False
