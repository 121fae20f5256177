"""`hubshard.pull` from an embedded Hub, and what the usual libraries make of what it leaves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hubshard
from hubshard.errors import FormatError, IncompleteError, NotFoundError
from hubshard.events import Event

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("starlette")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

UPLOAD = """
    import sys
    from huggingface_hub import HfApi
    repo, folder = sys.argv[1:3]
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    print(api.upload_folder(repo_id=repo, folder_path=folder, delete_patterns="*").oid)
"""
LOAD = """
    import hashlib, sys
    from transformers import AutoModelForCausalLM
    for revision in sys.argv[2:]:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], revision=revision)
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        print(digest.hexdigest())
"""
PULL = """
    import json, sys
    import hubshard
    events = []
    path = hubshard.pull(sys.argv[1], on_event=events.append, **json.loads(sys.argv[2]))
    print(path)
    print(json.dumps([event.detail for event in events if event.kind == "warning"]))
"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def published(hub: Hub, folder: Path, *, seed: int, max_shard_size: str, repo: str = "org/model") -> str:
    """Make a small Llama and upload it with the plain client; the commit."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)
    return hub.client(UPLOAD, repo, folder).split()[-1]


def loaded(folder: Path) -> str:
    """The digest of the tensors that transformers loads from a directory, as `LOAD` prints it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def pull(hub: Hub, repo: str = "org/model", **choices: Any) -> Path:
    """In this process."""
    return hubshard.pull(repo, endpoint=hub.url, token="hf_test", **choices)


def nbytes_fetched(hub: Hub) -> int:
    """What the server has sent of contents since its counters were reset."""
    total = hub.counters()["total"]
    return int(total["resolve_sent"]) + int(total["xet_sent"])


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_transformers_loads_what_was_pulled_online_offline_and_by_commit(
    hub: Hub, tmp_path: Path, max_shard_size: str
) -> None:
    commit = published(hub, tmp_path / "made", seed=1, max_shard_size=max_shard_size)
    expected = loaded(tmp_path / "made")
    home = tmp_path / "pulled-home"
    snapshot = Path(hub.client(PULL, "org/model", "{}", home=home).splitlines()[0])
    assert snapshot == home / "hub/models--org--model/snapshots" / commit
    hub.reset_counters()
    assert hub.client(LOAD, "org/model", "main", home=home).split() == [expected]
    assert hub.client(LOAD, "org/model", "main", commit, home=home, env=OFFLINE).split() == [expected] * 2


def test_huggingface_hub_takes_the_cache_for_its_own(hub: Hub, tmp_path: Path) -> None:
    commit = published(hub, tmp_path / "made", seed=1, max_shard_size="100KB")
    cache = tmp_path / "home" / "hub"
    snapshot = pull(hub, cache_dir=cache)
    count = len([path for path in snapshot.rglob("*") if path.is_file()])
    hub.reset_counters()
    looks = """
        import sys
        from pathlib import Path
        from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download, try_to_load_from_cache
        found = scan_cache_dir()
        assert not found.warnings, found.warnings
        [repo] = found.repos
        [revision] = repo.revisions
        print(repo.repo_id, revision.commit_hash, sorted(revision.refs), len(revision.files))
        print(snapshot_download("org/model"))
        print(hf_hub_download("org/model", "config.json"))
        print(try_to_load_from_cache("org/model", "model-00001-of-00004.safetensors"))
    """
    printed = hub.client(looks, home=tmp_path / "home").splitlines()
    assert printed[0] == f"org/model {commit} ['main'] {count}"
    assert printed[1] == str(snapshot)
    assert printed[2] == str(snapshot / "config.json")
    assert nbytes_fetched(hub) < 5_000


def test_a_directory_holds_what_transformers_loads_and_the_next_revision_replaces_it(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    for seed, size in ((1, "100KB"), (2, "5GB"), (3, "200KB")):
        made = tmp_path / str(seed)
        published(hub, made, seed=seed, max_shard_size=size)
        assert pull(hub, local_dir=target) == target
        assert loaded(target) == loaded(made)
        there = {path.name for path in target.iterdir()} - {".cache"}
        assert there == {path.name for path in made.iterdir()}


def test_a_second_pull_moves_no_weights(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "made", seed=1, max_shard_size="100KB")
    targets: list[dict[str, Any]] = [{"cache_dir": tmp_path / "cache"}, {"local_dir": tmp_path / "model"}]
    for target in targets:
        first = pull(hub, **target)
        hub.reset_counters()
        assert pull(hub, **target) == first
        assert nbytes_fetched(hub) < 20_000


def test_a_snapshot_that_the_plain_client_began_is_completed(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "made", seed=1, max_shard_size="100KB")
    home = tmp_path / "home"
    hub.client("import huggingface_hub as h; h.hf_hub_download('org/model', 'model.safetensors.index.json')", home=home)
    pull(hub, cache_dir=home / "hub")
    expected = loaded(tmp_path / "made")
    assert hub.client(LOAD, "org/model", "main", home=home, env=OFFLINE).split() == [expected]


def test_offline_what_is_complete_is_used_and_said(hub: Hub, tmp_path: Path) -> None:
    commit = published(hub, tmp_path / "made", seed=1, max_shard_size="100KB")
    home = tmp_path / "home"
    online = hub.client(PULL, "org/model", "{}", home=home).splitlines()
    offline = hub.client(PULL, "org/model", "{}", home=home, env=OFFLINE).splitlines()
    assert offline[0] == online[0]
    assert any(commit in warning for warning in json.loads(offline[1]))
    (home / "hub/models--org--model/refs/main").unlink()
    by_commit = hub.client(PULL, "org/model", json.dumps({"revision": commit}), home=home, env=OFFLINE)
    assert by_commit.splitlines()[0] == online[0]


def test_with_the_server_gone_what_is_complete_is_used_and_what_is_not_is_refused(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "made", seed=1, max_shard_size="100KB")
    snapshot = pull(hub, cache_dir=tmp_path / "cache")
    hub.stop()
    events: list[Event] = []
    again = pull(hub, cache_dir=tmp_path / "cache", max_retries=1, on_event=events.append)
    assert again == snapshot
    assert any(event.kind == "warning" and str(snapshot) in event.detail for event in events)
    (snapshot / "config.json").resolve().write_text("{}")
    with pytest.raises(IncompleteError, match=r"config\.json"):
        pull(hub, cache_dir=tmp_path / "cache", max_retries=0)


def test_an_empty_directory_name_is_not_the_current_one(hub: Hub) -> None:
    with pytest.raises(FormatError, match="local_dir"):
        pull(hub, local_dir="")


@pytest.mark.parametrize(("repo", "revision"), [("org/nothing", None), ("org/model", "v9")])
def test_what_does_not_exist_is_not_found(hub: Hub, tmp_path: Path, repo: str, revision: str | None) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/config.json").write_text("{}")
    hub.client(UPLOAD, "org/model", tmp_path / "made")
    with pytest.raises(NotFoundError, match=repo):
        pull(hub, repo, revision=revision, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("xet", [True, False])
def test_a_pull_that_is_killed_goes_on_where_it_was(hub: Hub, tmp_path: Path, xet: bool) -> None:
    """Killed when six tenths have arrived; the server counts what is fetched again."""
    made, nbytes = tmp_path / "made", 160 * 2**20
    make = """
        import json, os, sys
        from pathlib import Path
        folder = Path(sys.argv[1]); folder.mkdir()
        (folder / "config.json").write_text("{}")
        names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {str(n): name for n, name in enumerate(names)}}))
        size = int(sys.argv[2]) // 2 - 8 - 96
        head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode().ljust(96)
        for name in names:
            (folder / name).write_bytes((96).to_bytes(8, "little") + head + os.urandom(size))
    """
    hub.client(make, made, str(nbytes))
    hub.client(UPLOAD, "org/model", made, xet=xet)
    die = """
        import os, sys, threading
        import hubshard
        arrived, lock = 0, threading.Lock()
        def on_event(event):
            global arrived
            if event.kind == "received":
                with lock:
                    arrived += event.nbytes
                    if arrived > 0.6 * int(sys.argv[2]):
                        os.kill(os.getpid(), 9)
        hubshard.pull("org/model", cache_dir=sys.argv[1], on_event=on_event)
    """
    killed = hub.try_client(die, tmp_path / "cache", str(nbytes), xet=xet)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "cache/models--org--model/snapshots").exists()
    hub.reset_counters()
    snapshot = pull(hub, cache_dir=tmp_path / "cache")
    assert {path.name: path.stat().st_size for path in made.iterdir()} == {
        path.name: path.stat().st_size for path in snapshot.iterdir()
    }
    fetched = nbytes_fetched(hub)
    assert fetched <= 0.4 * nbytes + 64 * 2**20
