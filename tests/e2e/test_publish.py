"""Publishing to a real Hub over HTTP: what readers see, what is sent, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from safetensors.numpy import load, save_file

import hubshard
from hubshard.errors import ConflictError, FormatError, HubshardError, NotFoundError, StoreError
from hubshard.events import Event

if TYPE_CHECKING:
    from tests.conftest import Hub, StartHub

TOKEN = "hf_test"
REPO = "org/model"


class Client:
    """Our publish and the plain client's eyes, on one Hub."""

    def __init__(self, hub: Hub, token: str = TOKEN) -> None:
        self.hub = hub
        self.token = token
        self.api = HfApi(endpoint=hub.url, token=token)

    def push(self, source: Any, repo_id: str = REPO, **options: Any) -> hubshard.Published:
        return hubshard.push_to_hub(source, repo_id, endpoint=self.hub.url, token=self.token, **options)

    def files(self, revision: str = "main") -> list[str]:
        return sorted(set(self.api.list_repo_files(REPO, revision=revision)) - {".gitattributes"})

    def read(self, path: str, revision: str = "main", cache: Path | None = None) -> bytes:
        local = self.api.hf_hub_download(REPO, path, revision=revision, cache_dir=cache or self.hub.home / "cache")
        return Path(local).read_bytes()

    def tensors(self, revision: str = "main") -> dict[str, np.ndarray[Any, Any]]:
        """By the index and nothing else."""
        files = self.files(revision)
        if "model.safetensors.index.json" not in files:
            return load(self.read("model.safetensors", revision))
        weight_map = json.loads(self.read("model.safetensors.index.json", revision))["weight_map"]
        shards = {file: load(self.read(file, revision)) for file in set(weight_map.values())}
        assert all(set(shards[file]) == {n for n, f in weight_map.items() if f == file} for file in shards)
        return {name: shards[file][name] for name, file in weight_map.items()}

    def commits(self, revision: str = "main") -> list[str]:
        return [commit.title for commit in self.api.list_repo_commits(REPO, revision=revision)]

    def branches(self) -> list[str]:
        return sorted(ref.name for ref in self.api.list_repo_refs(REPO).branches)


@pytest.fixture
def client(hub: Hub) -> Client:
    return Client(hub)


def weights(*, layers: int = 8, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"layers.{i}.weight": rng.standard_normal((64, 128), dtype=np.float32) for i in range(layers)}


def equal(a: Mapping[str, np.ndarray[Any, Any]], b: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    save_file(weights(), made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (made / "README.md").write_text("# A model\n")
    (made / "tokenizer").mkdir()
    (made / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return made


def test_a_directory_is_published_in_shards_by_one_commit(client: Client, folder: Path) -> None:
    published = client.push(folder, max_shard_size="100kB", message="First")
    assert published.changed
    assert client.commits()[0] == "First"
    assert len(client.commits()) == 2  # the Hub's own first one, and ours
    assert published.shards == 3
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert client.files() == sorted(
        [*names, "model.safetensors.index.json", "config.json", "README.md", "tokenizer/vocab.txt"]
    )
    assert equal(client.tensors(), weights())
    sizes = [entry.size for entry in client.api.get_paths_info(REPO, names) if isinstance(entry, RepoFile)]
    assert len(sizes) == 3
    assert max(sizes) <= 100_000
    assert client.branches() == ["main"]
    index = json.loads(client.read("model.safetensors.index.json"))
    assert index["metadata"]["total_parameters"] == 8 * 64 * 128
    assert index["metadata"]["total_size"] == 8 * 64 * 128 * 4


def test_the_same_tensors_give_the_same_bytes_whatever_their_order(client: Client) -> None:
    client.push(weights(), max_shard_size="100kB")
    again = client.push(dict(reversed(weights().items())), max_shard_size="100kB")
    assert not again.changed
    assert again.sent_bytes == 0


def test_an_unchanged_model_is_not_sent_and_makes_no_commit(client: Client, folder: Path) -> None:
    first = client.push(folder, max_shard_size="100kB")
    client.hub.reset_counters()
    second = client.push(folder, max_shard_size="100kB")
    assert (second.changed, second.sent_bytes, second.commit) == (False, 0, first.commit)
    assert len(client.commits()) == 2
    counted = client.hub.counters(f"models/{REPO}")
    assert counted["xet_received"] == counted["lfs_received"] == 0


@pytest.mark.parametrize(("first", "second"), [("50kB", "150kB"), ("150kB", "50kB"), ("50kB", "5GB"), ("5GB", "50kB")])
def test_no_stale_weight_file_survives_another_shard_count(
    client: Client, folder: Path, first: str, second: str
) -> None:
    client.push(folder, max_shard_size=first)
    published = client.push(folder, max_shard_size=second)
    assert len(client.commits()) == 3
    present = [path for path in client.files() if path.startswith("model")]
    [plan] = published.plans
    planned = [shard.path for shard in plan.shards]
    assert present == sorted([*planned, *([plan.index_path] if plan.index_path else [])])
    assert published.deleted
    assert equal(client.tensors(), weights())


def test_only_weight_files_of_the_same_variant_and_folder_are_replaced(client: Client, folder: Path) -> None:
    client.push(folder, max_shard_size="100kB")
    others = ["model.fp16.safetensors", "style/adapter_model.safetensors", "unet/model.safetensors", "optimizer.bin"]
    stale = ["pytorch_model.bin", "consolidated.safetensors", "pytorch_model-00001-of-00002.bin"]
    for path in (*others, *stale):
        client.api.upload_file(path_or_fileobj=b"x" * 100, path_in_repo=path, repo_id=REPO)
    published = client.push(folder)
    assert set(stale) <= set(published.deleted)
    assert set(others) <= set(client.files())
    assert not set(stale) & set(client.files())


def test_a_variant_lives_beside_the_plain_weights(client: Client) -> None:
    client.push(weights(), max_shard_size="100kB")
    half = {name: value.astype(np.float16) for name, value in weights().items()}
    client.push(half, variant="fp16", max_shard_size="60kB")
    assert "model.fp16-00001-of-00003.safetensors" in client.files()
    assert "model.safetensors.index.fp16.json" in client.files()
    assert equal(client.tensors(), weights())
    client.push(half, variant="fp16")
    assert [p for p in client.files() if "fp16" in p] == ["model.fp16.safetensors"]


def test_another_repo_can_be_the_source(client: Client, folder: Path) -> None:
    client.push(folder, max_shard_size="100kB")
    copy = client.api.create_repo("org/copy").repo_id
    hubshard.push_to_hub(f"hf://{REPO}", copy, endpoint=client.hub.url, token=TOKEN)
    assert sorted(client.api.list_repo_files(copy)) == sorted(client.api.list_repo_files(REPO))


def test_tags_are_made_and_only_moved_when_asked(client: Client) -> None:
    first = client.push(weights(), tag="v1")
    tags = {ref.name: ref.target_commit for ref in client.api.list_repo_refs(REPO).tags}
    assert tags == {"v1": first.commit}
    head = client.api.repo_info(REPO).sha
    with pytest.raises(ConflictError, match="v1"):
        client.push(weights(seed=1), tag="v1")
    assert client.api.repo_info(REPO).sha == head
    moved = client.push(weights(seed=1), tag="v1", move_tag=True)
    tags = {ref.name: ref.target_commit for ref in client.api.list_repo_refs(REPO).tags}
    assert tags == {"v1": moved.commit}


def test_a_pull_request_leaves_the_branch_alone(client: Client) -> None:
    client.push(weights())
    head = client.api.repo_info(REPO).sha
    published = client.push(weights(seed=1), create_pr=True)
    assert client.api.repo_info(REPO).sha == head
    assert published.pr_url is not None
    number = int(re.findall(r"(\d+)$", published.pr_url)[0])
    assert equal(client.tensors(f"refs/pr/{number}"), weights(seed=1))
    client.api.merge_pull_request(REPO, number)
    assert equal(client.tensors(), weights(seed=1))


def test_a_new_branch_starts_from_main(client: Client, folder: Path) -> None:
    client.push(folder)
    client.push(weights(seed=1), revision="next")
    assert equal(client.tensors("next"), weights(seed=1))
    assert "config.json" in client.files("next")
    assert equal(client.tensors(), weights())


def test_a_new_branch_is_made_also_when_main_holds_the_same(client: Client) -> None:
    first = client.push(weights())
    again = client.push(weights(), revision="stable")
    assert client.branches() == ["main", "stable"]
    assert (again.changed, again.commit) == (False, first.commit)


BAD_NAMES = ["", "a b", "a..b", "-v", "v.lock", "v~1", "v\n", "x" * 300, "0123456789" * 4, "refs/heads/x", "@"]


def test_a_name_that_no_branch_or_tag_can_have_is_refused_first(client: Client) -> None:
    for argument, name in product(["revision", "tag"], BAD_NAMES):
        with pytest.raises(FormatError, match="no name for a"):
            client.push(weights(), **{argument: name})
    assert not client.api.repo_exists(REPO)


def test_only_branches_and_pull_requests_are_published_to(client: Client) -> None:
    first = client.push(weights(), tag="v1")
    assert first.commit
    for revision in ("v1", first.commit[:10]):
        with pytest.raises(FormatError, match="only branches move"):
            client.push(weights(seed=1), revision=revision)
    with pytest.raises(NotFoundError, match="refs/pr/7"):
        client.push(weights(seed=1), revision="refs/pr/7")
    assert client.branches() == ["main"]
    assert equal(client.tensors(), weights())


def test_a_name_that_would_mean_a_branch_and_a_tag_is_refused_before_anything_is_written(client: Client) -> None:
    for options in ({"tag": "main"}, {"tag": "next", "revision": "next"}, {"tag": "main", "revision": "next"}):
        with pytest.raises(FormatError, match="is the name of a branch"):
            client.push(weights(), **options)
    assert not client.api.repo_exists(REPO)
    client.push(weights())
    client.push(weights(), revision="next")
    before = client.commits()
    with pytest.raises(FormatError, match="'next' is the name of a branch"):
        client.push(weights(seed=1), tag="next")
    client.api.create_tag(REPO, tag="next")
    with pytest.raises(FormatError, match="'next' is a branch and a tag"):
        client.push(weights(seed=1), revision="next")
    assert client.commits() == client.commits("next") == before
    assert client.branches() == ["main", "next"]


def test_a_pull_request_takes_further_commits(client: Client) -> None:
    client.push(weights())
    opened = client.push(weights(seed=1), create_pr=True)
    assert opened.pr_url
    client.push(weights(seed=2), revision="refs/pr/1")
    assert equal(client.tensors("refs/pr/1"), weights(seed=2))
    assert equal(client.tensors(), weights())
    assert client.branches() == ["main"]


def test_a_dry_run_plans_and_writes_nothing(client: Client, folder: Path) -> None:
    published = client.push(folder, max_shard_size="100kB", dry_run=True)
    assert published.commit is None
    assert published.shards == 3
    assert not client.api.repo_exists(REPO)


def test_the_head_must_be_the_expected_one(client: Client) -> None:
    first = client.push(weights())
    assert first.commit
    second = client.push(weights(seed=1), expected_head=first.commit[:8])
    with pytest.raises(ConflictError, match=str(second.commit)):
        client.push(weights(seed=2), expected_head=first.commit)
    assert equal(client.tensors(), weights(seed=1))


def test_visibility_is_set_for_a_new_repo_and_never_assumed(client: Client) -> None:
    client.push(weights(), private=True)
    assert client.api.repo_info(REPO).private
    with pytest.raises(FormatError, match="private"):
        client.push(weights(), private=False)


def interfering(client: Client, then: Callable[[], object]) -> Callable[[Event], None]:
    done: list[object] = []

    def on_event(event: Event) -> None:
        if event.kind == "staged" and not done:
            done.append(then())

    return on_event


def test_a_branch_moved_in_other_files_is_built_upon(client: Client) -> None:
    client.push(weights())

    def meanwhile() -> None:
        client.api.upload_file(path_or_fileobj=b"notes", path_in_repo="notes.txt", repo_id=REPO)

    client.push(weights(seed=1), on_event=interfering(client, meanwhile))
    assert "notes.txt" in client.files()
    assert equal(client.tensors(), weights(seed=1))


def test_a_branch_moved_in_our_files_is_a_conflict_that_names_them(client: Client) -> None:
    client.push(weights())

    def meanwhile() -> None:
        client.push(weights(seed=2), message="I was first")

    with pytest.raises(ConflictError, match=r"model\.safetensors") as caught:
        client.push(weights(seed=1), on_event=interfering(client, meanwhile))
    assert "I was first" in str(caught.value)
    assert equal(client.tensors(), weights(seed=2))


KILLED = """
import os, signal, sys
import hubshard

staged = 0

def die_half_way(event):
    global staged
    staged += event.kind == "staged"
    if staged == 4:
        os.kill(os.getpid(), signal.SIGKILL)

hubshard.push_to_hub(sys.argv[1], sys.argv[2], max_shard_size="1MB", staging_batch_size="1MB", on_event=die_half_way)
"""


def test_a_killed_publish_goes_on_on_another_machine_and_sends_nothing_twice(client: Client, tmp_path: Path) -> None:
    client.push(weights())
    big = {f"layers.{i}.weight": np.frombuffer(np.random.default_rng(i).bytes(900_000), np.uint8) for i in range(8)}
    (tmp_path / "big").mkdir()
    save_file(big, tmp_path / "big" / "model.safetensors")
    killed = client.hub.try_client(KILLED, tmp_path / "big", REPO, home=tmp_path / "first machine")
    assert killed.returncode == -9, killed.stderr
    assert equal(client.tensors(), weights())
    assert [name for name in client.branches() if name.startswith("hubshard/staging/")]
    client.hub.reset_counters()
    client.hub.client(
        "import hubshard, sys; hubshard.push_to_hub(sys.argv[1], sys.argv[2], max_shard_size='1MB')",
        tmp_path / "big",
        REPO,
        home=tmp_path / "second machine",
    )
    assert client.hub.counters(f"models/{REPO}")["xet_received"] < 6 * 900_000
    assert equal(client.tensors(), big)
    assert client.branches() == ["main"]


def test_tied_tensors_are_stored_once_and_their_names_kept(client: Client) -> None:
    torch = pytest.importorskip("torch")
    tied = torch.ones(4, 4)
    client.push({"embed.weight": tied, "head.weight": tied, "other": torch.zeros(3)})
    header = client.read("model.safetensors")
    assert load(header).keys() == {"embed.weight", "other"}
    opened = hubshard.open_checkpoint(f"hf://{REPO}", endpoint=client.hub.url, token=TOKEN)
    assert torch.equal(opened["head.weight"][...], tied)


def _pickled(folder: Path) -> object:
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    return folder


def _html(folder: Path) -> object:
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>" + b" " * 60)
    return folder


def _pointer(folder: Path) -> object:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    return folder


def _sharded(folder: Path) -> dict[str, str]:
    save_file({"a": np.zeros(4)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(4)}, folder / "model-00002-of-00002.safetensors")
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def _index(folder: Path, weight_map: Mapping[str, str]) -> object:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _missing_shard(folder: Path) -> object:
    _index(folder, _sharded(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def _wrong_shard(folder: Path) -> object:
    return _index(folder, _sharded(folder) | {"b": "model-00001-of-00002.safetensors"})


def _no_index(folder: Path) -> object:
    _sharded(folder)
    return folder


def _pointer_beside(folder: Path) -> object:
    save_file({"a": np.zeros(4)}, folder / "model.safetensors")
    oid = "0123456789abcdef" * 4
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 1234567\n"
    (folder / "tokenizer.json").write_text(text, newline="\n")
    return folder


def _only_folders(folder: Path) -> object:
    (folder / "unet").mkdir()
    save_file({"a": np.zeros(4)}, folder / "unet" / "model.safetensors")
    return folder


def _no_tensor(folder: Path) -> object:
    save_file({}, folder / "model.safetensors")
    return folder


def _no_name(folder: Path) -> object:
    save_file({"a": np.zeros(4)}, folder / "model.safetensors")
    (folder / "notes .txt ").write_text("a Windows disk would drop the space")
    return folder


def _meta(_: Path) -> object:
    torch = pytest.importorskip("torch")
    return {"a": torch.ones(2), "offloaded": torch.empty(3, device="meta")}


def _same_but_for_case(folder: Path) -> object:
    save_file({"a": np.zeros(4)}, folder / "model.safetensors")
    (folder / "notes.txt").write_text("1")
    (folder / "Notes.txt").write_text("2")
    return folder


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown dtype": (lambda _: {"w": np.zeros(3, np.complex128)}, "'w'.*complex128"),
    "reserved name": (lambda _: {"__metadata__": np.zeros(3)}, "__metadata__"),
    "no tensors": (lambda _: {}, "no tensor"),
    "no such path": (lambda folder: folder / "missing", "missing"),
    "empty folder": (lambda folder: folder, "model.safetensors"),
    "meta tensor": (_meta, "offloaded"),
    "pickle": (_pickled, "pytorch_model.bin"),
    "html page": (_html, "model.safetensors.*HTML"),
    "lfs pointer": (_pointer, "model.safetensors.*pointer"),
    "traversal": (lambda folder: _index(folder, _sharded(folder) | {"b": "../b.safetensors"}), r"\.\./b"),
    "missing shard": (_missing_shard, "model-00002-of-00002"),
    "wrong shard": (_wrong_shard, "'b'"),
    "no index": (_no_index, "index"),
    "a Git LFS pointer beside the weights": (_pointer_beside, "tokenizer.json"),
    "a name that is none everywhere": (_no_name, "notes .txt "),
    "a file without tensors": (_no_tensor, "no tensor"),
    "a folder of folders": (_only_folders, "only folders"),
    "two files equal but for case": (_same_but_for_case, "otes.txt"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_clear_error_and_changes_nothing(client: Client, tmp_path: Path, kind: str) -> None:
    client.push(weights())
    make, said = BAD[kind]
    folder = tmp_path / "bad"
    folder.mkdir()
    with pytest.raises(HubshardError, match=said):
        client.push(make(folder))
    assert len(client.commits()) == 2
    assert client.branches() == ["main"]


@pytest.mark.parametrize("repo_id", ["a/b/c", "org/mod el", "../x", "org/", "org/model.git", "x" * 97])
def test_a_bad_repo_id_is_refused(client: Client, repo_id: str) -> None:
    with pytest.raises(FormatError, match="repo id"):
        client.push(weights(), repo_id)


@pytest.mark.parametrize("size", ["0", "-1GB", "5 apples", "1.2.3GB", "", "GB", 0, -5])
def test_a_bad_shard_size_is_refused(client: Client, size: object) -> None:
    with pytest.raises(FormatError, match="size"):
        client.push(weights(), max_shard_size=size)


def test_without_permission_nothing_happens_and_the_missing_right_is_named(start_hub: StartHub) -> None:
    from hubshard.hubserver import Settings

    hub = start_hub(Settings(tokens={"hf_owner": "org", "hf_reader": "reader:read"}))
    owner, reader = Client(hub, "hf_owner"), Client(hub, "hf_reader")
    owner.push(weights())
    with pytest.raises(StoreError, match="write"):
        reader.push(weights(seed=1))
    owner.push(weights(), "org/hidden", private=True)
    with pytest.raises((NotFoundError, StoreError), match="org/hidden"):
        reader.push(weights(seed=1), "org/hidden")
    assert equal(owner.tensors(), weights())
