"""DCP's save and load on a Hub, as clients in processes of their own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")

SETUP = """
import json, os, sys, urllib.request, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from hubshard.dcp import HubReader, HubWriter
from hubshard.errors import ConflictError, IntegrityError, NotFoundError
from hubshard.store.hub import HubStore
warnings.filterwarnings("ignore", message="torch.distributed is .*assuming the intent is")

repo, tmp = sys.argv[1], Path(sys.argv[2])
store = HubStore(repo)

def state(seed, rows=600):
    torch.manual_seed(seed)
    return {"w": torch.randn(rows, 500), "steps": torch.tensor(seed), "small": torch.randn(7).bfloat16(), "n": seed}

def same(one, other):
    return all(torch.equal(one[key], other[key]) if key != "n" else one[key] == other[key] for key in other)

def save(seed, step, **options):
    writer = HubWriter(options.pop("repo", repo), step=step, **options)
    dcp.save(state(seed), storage_writer=writer)
    return writer

def load(into, **options):
    reader = HubReader(options.pop("repo", repo), **options)
    dcp.load(into, storage_reader=reader)
    return reader

def sent():
    with urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/-/counters") as answer:
        counted = json.load(answer)["total"]
    return counted["resolve_sent"] + counted["xet_sent"]

def failure(call):
    try:
        call()
    except CheckpointException as error:
        return next(iter(error.failures.values()))[0]
    raise SystemExit("it did not fail")
"""


def _run(hub: Hub, repo: str, tmp_path: Path, code: str) -> None:
    hub.client(SETUP + textwrap.dedent(code), repo, tmp_path)


@pytest.fixture
def repo(module_hub: Hub, request: pytest.FixtureRequest) -> str:
    """A repo of the test's own."""
    name = f"org/{request.node.name[:60].strip('_')}"
    module_hub.api()("POST", "/api/repos/create", {"name": name.partition("/")[2], "organization": "org"})
    return name


def test_steps_are_saved_from_memory_and_from_a_folder_and_loaded_by_a_machine_that_has_neither(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    first = save(1, 10)
    head = store.head("resume")
    assert first.revision == head, (first.revision, head)
    assert not list(tmp.iterdir())
    second = save(2, 20, local_dir=tmp / "steps", max_file_size="500kB")
    assert len(second.saved.files) > 2
    commits = [entry.path for entry in store.list(store.head("resume"))]
    assert "step-00000010/manifest.json" in commits and "step-00000020/manifest.json" in commits

    got = state(9)
    reader = load(got)
    assert same(got, state(2)) and reader.opened.step.step == 20 and reader.nbytes_read > 1_200_000
    got = state(9)
    load(got, step=10)
    assert same(got, state(1))
    got = state(9)
    assert load(got, local_dir=tmp / "steps").opened.folder.where.startswith(str(tmp))
    assert same(got, state(2))
    # a file of the newest local step is gone: the same step is taken from the Hub
    next((tmp / "steps" / "step-00000020").glob("rank-*")).unlink()
    got = state(9)
    assert load(got, local_dir=tmp / "steps").opened.folder.where == f"{repo}@resume/step-00000020"
    assert same(got, state(2))
    """
    _run(module_hub, repo, tmp_path, code)


def test_what_is_damaged_in_the_local_folder_is_read_from_the_branch(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    import logging
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    folder = tmp / "steps"
    save(1, 10, local_dir=folder)
    save(2, 20, local_dir=folder, max_file_size="500kB")
    for path in (folder / "step-00000020").glob("rank-*"):
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
    for step in (None, 20):
        got = state(9)
        before = sent()
        reader = load(got, local_dir=folder, step=step)
        assert same(got, state(2)) and reader.opened.folder.where.startswith(str(folder))
        assert sent() > before

    path.unlink()
    got = state(9)
    load(got, local_dir=folder, step=20)
    assert same(got, state(2))

    path = next((folder / "step-00000010").glob("rank-*"))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    store.delete_branch("resume")
    error = failure(lambda: load(state(9), local_dir=folder, step=10))
    assert isinstance(error, IntegrityError) and "nor can it be read from the branch" in str(error), error
    """
    out = module_hub.client(SETUP + textwrap.dedent(code), repo, tmp_path)
    assert out.count(f"; what is damaged is read from {repo}@resume/step-00000020") == 2


def test_a_save_is_one_commit_that_also_removes_an_older_save_of_the_step(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    from huggingface_hub import HfApi
    api = HfApi()
    save(1, 10)
    before = len(api.list_repo_commits(repo, revision="resume"))
    save(2, 20, local_dir=tmp / "a")
    assert len(api.list_repo_commits(repo, revision="resume")) == before + 1
    save(1, 20, local_dir=tmp / "a")  # the step is saved again: its old files go in the same commit
    names = [e.path for e in store.list(store.head("resume")) if e.path.startswith("step-00000020/")]
    assert len(names) == 2, names
    got = state(9)
    load(got, step=20)
    assert same(got, state(1))
    """
    _run(module_hub, repo, tmp_path, code)


def test_a_branch_that_somebody_else_moved_is_a_conflict_and_their_step_stays(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    save(1, 10)

    class Slow(HubWriter):
        def write_data(self, plan, planner):
            save(5, 30)  # the other run commits while we write
            return super().write_data(plan, planner)

    error = failure(lambda: dcp.save(state(2), storage_writer=Slow(repo, step=20)))
    assert isinstance(error, ConflictError), error
    assert "Step 30" in str(error), error
    got = state(9)
    assert load(got).opened.step.step == 30 and same(got, state(5))

    error = failure(lambda: save(2, 20))
    assert isinstance(error, ConflictError) and "holds step 30 already" in str(error), error
    error = failure(lambda: save(2, 40, expected_head="0" * 40))
    assert isinstance(error, ConflictError) and "is at" in str(error), error
    head = store.head("resume").commit
    assert save(2, 40, expected_head=head).revision.commit != head
    """
    _run(module_hub, repo, tmp_path, code)


def test_a_missing_or_exchanged_file_on_the_branch_is_refused_and_the_step_before_is_taken(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    save(1, 10)
    save(2, 20, max_file_size="500kB")
    head = store.head("resume")
    gone = next(e.path for e in store.list(head) if e.path.startswith("step-00000020/rank"))
    store.commit("resume", parent=head, add=[], remove=[gone], message="oops", publish_id="p1")
    got = state(9)
    try:
        HubReader(repo, step=20).read_metadata()
        raise SystemExit("read")
    except Exception as error:
        assert type(error).__name__ == "IncompleteError" and gone.rpartition("/")[2] in str(error), error
    assert load(got).opened.step.step == 10 and same(got, state(1))

    head = store.head("resume")
    entry = next(e for e in store.list(head) if "00010/rank-" in e.path)
    raw = bytearray(entry.nbytes)
    store.read(head, entry.path, 0, entry.nbytes, memoryview(raw))
    raw[-5] ^= 1
    staged = store.stage("resume", entry.path, lambda: [bytes(raw)], nbytes=len(raw))
    store.commit("resume", parent=head, add=[staged], remove=[], message="swap", publish_id="p2")
    try:
        HubReader(repo, step=10).read_metadata()
        raise SystemExit("read")
    except IntegrityError as error:
        assert "has the sha256" in str(error), error
    """
    _run(module_hub, repo, tmp_path, code)


def test_async_saves_land_parts_are_read_by_ranges_and_what_is_not_there_is_said(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    held = state(1)
    future = dcp.async_save(held, storage_writer=HubWriter(repo, step=1, branch="run/a"))
    held["w"].zero_()
    future.result()
    got = state(9)
    load(got, branch="run/a")
    assert same(got, state(1))
    try:
        HubReader(repo, branch="nothing").read_metadata()
        raise SystemExit("read")
    except NotFoundError as error:
        assert "no branch 'nothing'" in str(error), error
    error = failure(lambda: save(1, 1, repo="org/none"))
    assert isinstance(error, NotFoundError), error

    big = {"big": torch.randn(4000, 1000), "other": torch.randn(10, 10), "n": 1}
    dcp.save(big, storage_writer=HubWriter(repo, step=1, branch="big"))
    before = sent()
    got = {"other": torch.zeros(10, 10)}
    reader = load(got, branch="big")
    assert torch.equal(got["other"], big["other"]) and reader.nbytes_read <= 2 * 2**16, reader.nbytes_read
    assert 0 < sent() - before <= reader.nbytes_read + 30_000, sent() - before
    """
    _run(module_hub, repo, tmp_path, code)


def test_a_reader_goes_past_what_a_rollback_left_on_the_disk_as_a_run_does(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    from hubshard.errors import FormatError
    from hubshard.resume.saves.seen_rollbacks import NAME
    from hubshard.steps.branch import StepBranch

    def newest(folder, **options):
        return load(state(0), local_dir=tmp / folder, **options).opened.step.step

    def refused(folder, kind):
        try:
            HubReader(repo, local_dir=tmp / folder).read_metadata()
        except kind as error:
            return str(error)

    for step in (2, 4, 6, 8):
        save(step, step, local_dir=tmp / "disk")
    save(10, 10, local_dir=tmp / "disk", repo=None)
    assert newest("disk") == 10
    StepBranch(repo).rollback(4)
    assert newest("disk") == 4
    assert newest("disk", step=8) == newest("disk", repo=None, step=8) == 8
    assert newest("disk", repo=None) == 10
    record = (tmp / "disk" / NAME).read_bytes()
    (tmp / "disk" / NAME).write_bytes(b"")
    assert str(tmp / "disk" / NAME) in refused("disk", FormatError)
    (tmp / "disk" / NAME).write_bytes(record)
    save(7, 7, local_dir=tmp / "disk")  # which goes on from 4
    assert newest("disk", repo=None) == newest("disk") == 7
    save(8, 8, local_dir=tmp / "disk", repo=None)
    assert newest("disk") == 8
    save(20, 20, local_dir=tmp / "foreign", repo=None)
    assert "holds step 20, but nothing says" in refused("foreign", ConflictError)
    """
    _run(module_hub, repo, tmp_path, code)


def test_what_was_saved_after_a_rollback_counts_though_its_commit_failed(
    module_hub: Hub, repo: str, tmp_path: Path
) -> None:
    code = """
    from hubshard.errors import StoreError
    from hubshard.resume.dcp import hub_writer
    from hubshard.steps.branch import StepBranch

    def refused(*args, **options):
        raise StoreError("the Hub is gone")

    for step in (10, 15):
        save(step, step, local_dir=tmp / "disk")
    StepBranch(repo).rollback(10)
    commit_step, hub_writer.commit_step = hub_writer.commit_step, refused
    assert "the Hub is gone" in str(failure(lambda: save(20, 20, local_dir=tmp / "disk")))
    hub_writer.commit_step = commit_step
    assert load(state(0), local_dir=tmp / "disk").opened.step.step == 20
    save(25, 25, local_dir=tmp / "disk")
    assert sorted(path.parent.name[-2:] for path in (tmp / "disk").glob("step-*/manifest.json")) == ["10", "20", "25"]
    """
    _run(module_hub, repo, tmp_path, code)
