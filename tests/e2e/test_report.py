"""verify, diff and rollback, of directories and of repos."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from safetensors.numpy import save_file

import hubshard
from hubshard.errors import ConflictError, FormatError, NotFoundError

if TYPE_CHECKING:
    from tests.conftest import Hub

TOKEN = "hf_test"


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"layers.{i}.weight": rng.standard_normal((64, 64), dtype=np.float32) for i in range(6)}


class Lab:
    """A repo with one model in three shards, and our functions on its Hub."""

    def __init__(self, hub: Hub, repo_id: str) -> None:
        self.hub = hub
        self.repo_id = repo_id
        self.api = HfApi(endpoint=hub.url, token=TOKEN)
        self.first = self.push(weights())

    def push(self, source: Any, **options: Any) -> hubshard.Published:
        options = {"max_shard_size": "40kB"} | options
        return hubshard.push_to_hub(source, self.repo_id, endpoint=self.hub.url, token=TOKEN, **options)

    def verify(self, target: Any, **options: Any) -> hubshard.Verification:
        return hubshard.verify(target, endpoint=self.hub.url, token=TOKEN, **options)

    def diff(self, a: Any, b: Any) -> hubshard.Difference:
        return hubshard.diff(a, b, endpoint=self.hub.url, token=TOKEN)

    def rollback(self, **options: Any) -> hubshard.RolledBack:
        return hubshard.rollback(self.repo_id, endpoint=self.hub.url, token=TOKEN, **options)

    def tree(self, revision: str) -> dict[str, str]:
        entries = self.api.list_repo_tree(self.repo_id, revision=revision, recursive=True)
        return {entry.path: entry.blob_id for entry in entries if isinstance(entry, RepoFile)}

    def copy(self, folder: Path) -> Path:
        """Of the head, by the plain client."""
        self.api.snapshot_download(self.repo_id, local_dir=folder)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        return folder


@pytest.fixture
def lab(module_hub: Hub, request: pytest.FixtureRequest) -> Lab:
    return Lab(module_hub, f"lab/{re.sub('[^a-z0-9]+', '-', request.node.name)[5:90].strip('-')}")


def test_a_repo_and_its_copy_verify(lab: Lab, tmp_path: Path) -> None:
    remote = lab.verify(f"hf://{lab.repo_id}")
    assert remote.ok
    assert (remote.tensors, remote.unknown) == (6, 0)
    local = lab.verify(lab.copy(tmp_path / "copy"), against=f"hf://{lab.repo_id}")
    assert local.ok
    assert local.files == remote.files
    unaided = lab.verify(tmp_path / "copy")
    assert unaided.ok
    assert (unaided.files, unaided.unknown) == (0, remote.files)


@pytest.mark.parametrize("how", ["pulled", "pulled to the cache", "downloaded", "downloaded to the cache"])
def test_what_was_pulled_or_downloaded_is_checked_by_the_hashes_that_were_noted(
    lab: Lab, tmp_path: Path, how: str
) -> None:
    place: dict[str, Any] = {"cache_dir" if "cache" in how else "local_dir": tmp_path / "copy"}
    if how.startswith("pulled"):
        copy = hubshard.pull(lab.repo_id, endpoint=lab.hub.url, token=TOKEN, **place)
    else:
        copy = Path(lab.api.snapshot_download(lab.repo_id, **place))
    found = lab.verify(copy)
    assert (found.ok, found.unknown, found.tensors) == (True, 0, 6)
    (copy / "notes.txt").write_text("my own")
    assert lab.verify(copy).unknown == 1
    shard = min(copy.glob("*.safetensors")).resolve()
    shard.chmod(0o644)
    flipped = bytearray(shard.read_bytes())
    flipped[-1] ^= 1
    shard.write_bytes(flipped)
    [problem] = lab.verify(copy).problems
    assert (problem.path, problem.kind) == (min(copy.glob("*.safetensors")).name, "hash")


def test_the_newer_of_two_downloads_into_a_directory_counts_and_a_small_file_that_is_gone_is_named(
    lab: Lab, tmp_path: Path
) -> None:
    lab.api.upload_file(path_or_fileobj=b"a note", path_in_repo="notes.txt", repo_id=lab.repo_id)
    copy = hubshard.pull(lab.repo_id, endpoint=lab.hub.url, token=TOKEN, local_dir=tmp_path / "copy")
    lab.push(weights(1))
    lab.api.snapshot_download(lab.repo_id, local_dir=copy)
    assert lab.verify(copy).ok
    hubshard.pull(lab.repo_id, endpoint=lab.hub.url, token=TOKEN, local_dir=copy)
    (copy / "notes.txt").unlink()
    [problem] = lab.verify(copy).problems
    assert (problem.path, problem.kind) == ("notes.txt", "missing")


def test_a_pull_of_one_variant_is_whole_against_a_repo_that_has_others_and_pickles(lab: Lab, tmp_path: Path) -> None:
    lab.push(weights(2), variant="fp16")
    for path in ("pytorch_model.bin", "checkpoint-5/model.safetensors"):
        lab.api.upload_file(path_or_fileobj=b"x", path_in_repo=path, repo_id=lab.repo_id)
    against = f"hf://{lab.repo_id}"
    for variant, other in ((None, "fp16"), ("fp16", None)):
        folder = tmp_path / str(variant)
        copy = hubshard.pull(lab.repo_id, endpoint=lab.hub.url, token=TOKEN, variant=variant, local_dir=folder)
        found = lab.verify(copy, against=against, variant=variant)
        assert found.problems == ()
        assert found.files > 3
        lost = {problem.path for problem in lab.verify(copy, against=against, variant=other).problems}
        assert len([path for path in lost if path.endswith(".safetensors")]) == 3
    with pytest.raises(NotFoundError, match="bf16"):
        lab.verify(tmp_path / "None", against=against, variant="bf16")


def test_a_directory_against_another_is_compared_byte_by_byte(lab: Lab, tmp_path: Path) -> None:
    one, two = lab.copy(tmp_path / "one"), lab.copy(tmp_path / "two")
    assert lab.verify(one, against=two).files == len([path for path in one.rglob("*") if path.is_file()])
    for number, folder in enumerate((one, two)):
        (folder / "notes.txt").write_text(str(number))
    [problem] = lab.verify(one, against=two).problems
    assert (problem.path, problem.kind) == ("notes.txt", "hash")


def test_one_file_against_a_repo_lacks_no_other(lab: Lab, tmp_path: Path) -> None:
    copy = lab.copy(tmp_path / "copy")
    found = lab.verify(min(copy.glob("*.safetensors")), against=f"hf://{lab.repo_id}")
    assert (found.ok, found.files) == (True, 1)


def test_one_file_of_a_variant_is_compared_whatever_variants_the_repo_has(lab: Lab, tmp_path: Path) -> None:
    lab.push(weights(2), variant="fp16")
    for entry in lab.api.list_repo_files(lab.repo_id):
        if "safetensors" in entry and "fp16" not in entry:
            lab.api.delete_file(entry, lab.repo_id)
    file = min(lab.copy(tmp_path / "copy").glob("*.safetensors"))
    found = lab.verify(file, against=f"hf://{lab.repo_id}")
    assert (found.ok, found.files) == (True, 1)


def test_every_damage_to_a_copy_is_named(lab: Lab, tmp_path: Path) -> None:
    copy = lab.copy(tmp_path / "copy")
    shards = sorted(copy.glob("*.safetensors"))
    flipped = bytearray(shards[0].read_bytes())
    flipped[-1] ^= 1
    shards[0].write_bytes(flipped)
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    shards[2].unlink()
    found = lab.verify(copy, against=f"hf://{lab.repo_id}")
    assert not found.ok
    assert {shard.name for shard in shards} <= {problem.path for problem in found.problems}
    assert any(problem.path == "" and shards[2].name in problem.what for problem in found.problems)


@pytest.mark.parametrize(
    "path",
    [
        *("adapter_model.safetensors", "model.fp16.safetensors", "diffusion_pytorch_model.safetensors"),
        *(
            "other.safetensors",
            "sub/adapter_model.safetensors",
            "sub/odd.safetensors",
            "checkpoint-5/model.safetensors",
        ),
    ],
)
def test_every_weight_file_is_looked_at_whatever_lies_beside_it(lab: Lab, tmp_path: Path, path: str) -> None:
    copy = lab.copy(tmp_path / "copy")
    (copy / path).parent.mkdir(exist_ok=True)
    (copy / path).write_bytes(b"<html>not found</html>")
    found = lab.verify(copy)
    assert [path in problem.what and "HTML" in problem.what for problem in found.problems] == [True]
    lab.api.upload_file(path_or_fileobj=b"<html>not found</html>", path_in_repo=path, repo_id=lab.repo_id)
    found = lab.verify(lab.repo_id)
    assert [path in problem.what and "HTML" in problem.what for problem in found.problems] == [True]


@pytest.mark.parametrize("stem", ["adapter_model", "model.fp16", "diffusion_pytorch_model"])
def test_every_index_is_looked_at_with_its_shards(lab: Lab, tmp_path: Path, stem: str) -> None:
    copy = lab.copy(tmp_path / "copy")
    shard = f"{stem}-00001-of-00002.safetensors"
    shutil.copyfile(min(copy.glob("*.safetensors")), copy / shard)
    weight_map = {"a": shard, "b": f"{stem}-00002-of-00002.safetensors"}
    (copy / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (problem,) = lab.verify(copy).problems
    assert f"{stem}.safetensors.index.json: 1 of the 2 shards" in problem.what


def test_an_index_in_another_form_is_equal_and_one_that_names_other_files_is_not(lab: Lab, tmp_path: Path) -> None:
    copy = lab.copy(tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    table = json.loads(index.read_bytes())
    index.write_text(json.dumps({"weight_map": table["weight_map"], "metadata": {"total_size": 1}}))
    found = lab.verify(copy, against=f"hf://{lab.repo_id}")
    assert found.ok, found.problems
    first, *_, last = sorted(table["weight_map"])
    table["weight_map"][first], table["weight_map"][last] = table["weight_map"][last], table["weight_map"][first]
    index.write_text(json.dumps(table))
    found = lab.verify(copy, against=f"hf://{lab.repo_id}")
    assert index.name in {problem.path for problem in found.problems}


def test_what_is_not_there_cannot_be_verified(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing-here"):
        lab.verify(tmp_path / "nothing-here")


def test_a_diff_names_what_was_added_removed_reshaped_and_changed(lab: Lab, tmp_path: Path) -> None:
    new = weights()
    del new["layers.0.weight"]
    new["layers.1.weight"] = new["layers.1.weight"].astype(np.float16)
    new["layers.2.weight"] = new["layers.2.weight"] + 1
    new["head.weight"] = np.ones((3, 3), np.float32)
    save_file(new, tmp_path / "model.safetensors")
    found = lab.diff(f"hf://{lab.repo_id}", tmp_path)
    assert found.added == ("head.weight",)
    assert found.removed == ("layers.0.weight",)
    assert list(found.reshaped) == ["layers.1.weight"]
    assert found.changed == ("layers.2.weight",)
    assert found.same == 3
    assert not found.is_empty


def test_thousands_of_small_tensors_are_compared_by_a_few_requests(lab: Lab, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    small = {f"layers.{i}.bias": rng.standard_normal(i % 5, dtype=np.float32) for i in range(3000)}
    small["large.weight"] = rng.standard_normal((300, 4096), dtype=np.float32)
    lab.push(small, max_shard_size="100kB")
    small["layers.7.bias"] = small["layers.7.bias"] + 1
    small["layers.2999.bias"] = small["layers.2999.bias"] + 1
    save_file(small, tmp_path / "model.safetensors")
    lab.hub.reset_counters()
    found = lab.diff(tmp_path, f"hf://{lab.repo_id}")
    assert found.changed == ("layers.2999.bias", "layers.7.bias")
    assert found.same == len(small) - 2
    assert sum(lab.hub.counters()["requests"].values()) < 40


def test_files_of_one_hash_are_not_read_again(lab: Lab) -> None:
    new = weights()
    new["layers.5.weight"] = new["layers.5.weight"] + 1
    lab.push(new)
    found = lab.diff(f"hf://{lab.repo_id}@{lab.first.commit}", f"hf://{lab.repo_id}")
    assert found.changed == ("layers.5.weight",)
    assert found.same == 5
    assert found.nbytes_read <= 2 * 64 * 64 * 4  # of the one shard that differs


def test_a_rollback_shows_the_old_tree_and_sends_no_weights(lab: Lab) -> None:
    before = lab.tree(str(lab.first.commit))
    lab.push(weights(1), max_shard_size="5GB")
    lab.api.upload_file(path_or_fileobj=b"x", path_in_repo="later.txt", repo_id=lab.repo_id)
    lab.hub.reset_counters()
    done = lab.rollback(to=lab.first.commit)
    assert done.changed
    assert "later.txt" in done.removed
    assert lab.tree("main") == before
    assert lab.api.list_repo_commits(lab.repo_id)[0].commit_id == done.commit
    assert len(lab.api.list_repo_commits(lab.repo_id)) == 5
    counted = lab.hub.counters(f"models/{lab.repo_id}")
    assert counted["xet_received"] == counted["lfs_received"] == 0
    assert lab.rollback(to=str(lab.first.commit)).changed is False


def test_a_rollback_needs_a_revision_and_the_expected_head(lab: Lab) -> None:
    with pytest.raises(NotFoundError, match="no-such"):
        lab.rollback(to="no-such")
    with pytest.raises(FormatError, match="empty"):
        lab.rollback(to="")
    second = lab.push(weights(1))
    with pytest.raises(ConflictError, match=str(second.commit)):
        lab.rollback(to=lab.first.commit, expected_head=lab.first.commit)
