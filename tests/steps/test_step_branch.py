"""Looking after the steps on a branch, against a real Hub."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hubshard import resume
from hubshard.errors import ConflictError, FormatError, IncompleteError, IntegrityError, NotFoundError
from hubshard.events import Event
from hubshard.protocols import Revision
from hubshard.steps.branch import StepBranch
from hubshard.steps.folder_lock import FolderLock
from hubshard.steps.freeing import Freed
from hubshard.steps.parts import Part, merge, plan_files
from hubshard.steps.places import LocalPlace
from hubshard.steps.step import Step, step_folder
from hubshard.steps.step_json import encode_step
from hubshard.steps.writing import PieceStream, commit_step, stage_stream
from hubshard.store.hub import HubStore
from hubshard.tensors import Box, TensorSpec
from tests.faults.proxy import lose, proxied
from tests.systems import KILLED

if TYPE_CHECKING:
    from tests.conftest import Hub

TOKEN = "hf_test"
REPO = "org/run"
ROWS, COLUMNS = 96, 1024  # of float32: 384 KiB per rank and step
FROZEN = TensorSpec("model.frozen", "F32", (16, 1024))


@pytest.fixture(params=["xet", "lfs"])
def store(hub: Hub, request: pytest.FixtureRequest) -> HubStore:
    """The repo, new."""
    made = HubStore(REPO, token=TOKEN, endpoint=hub.url, xet=request.param == "xet")
    made.create_repo()
    return made


def branch_of(hub: Hub, name: str = "resume", on_event: Callable[[Event], None] = lambda _: None) -> StepBranch:
    return StepBranch(REPO, name, token=TOKEN, endpoint=hub.url, on_event=on_event)


def content(spec: TensorSpec, box: Box, seed: str) -> bytes:
    """Rows of random bytes."""
    row_bytes = spec.nbytes // spec.shape[0]
    rows = range(box.offset[0], box.offset[0] + box.shape[0])
    return b"".join(random.Random(f"{seed} {spec.name} {row}").randbytes(row_bytes) for row in rows)


def save(
    store: HubStore, number: int, *, world: int = 2, branch: str = "resume", block_bytes: int = 64 * 2**10
) -> Step:
    """Save a step: one tensor, cut by rows, and one that never changes, on the last rank, in a file of its own."""
    moving = TensorSpec("model.weight", "F32", (ROWS * world, COLUMNS))
    receipts, staged = [], []
    for rank in range(world):
        parts = [Part(moving, Box((ROWS * rank, 0), (ROWS, COLUMNS)))]
        if rank == world - 1:
            parts.append(Part(FROZEN, FROZEN.box))
        for count, planned in enumerate(plan_files(parts, max_file_bytes=400 * 2**10), start=1):
            stream = PieceStream(
                planned,
                stem=f"rank-{rank:05d}-{count:05d}",
                read=lambda part, box: content(part.spec, box, "" if part.spec == FROZEN else str(number)),
                block_bytes=block_bytes,
            )
            staged.append(stage_stream(store, branch, stream, step=number))
            receipts.append(stream.receipt)
    step = merge(
        receipts, step=number, world_size=world, scalars={"epoch": 1, "lr": 0.5}, paths={}, metadata={"by": "a test"}
    )
    commit_step(store, branch, parent=store.head(branch), step=step, raw=encode_step(step), staged=staged)
    return step


def save_all(store: HubStore, *numbers: int) -> dict[int, Step]:
    return {number: save(store, number) for number in numbers}


def put(store: HubStore, branch: str, path: str, data: bytes) -> Revision:
    """Commit a file."""
    staged = store.stage(branch, path, lambda: [data], nbytes=len(data))
    return store.commit(branch, parent=store.head(branch), add=[staged], remove=[], message="put", publish_id="p1")


def remove(store: HubStore, branch: str, *paths: str) -> Revision:
    return store.commit(branch, parent=store.head(branch), add=[], remove=paths, message="remove", publish_id="p2")


def moving_bytes(*steps: Step) -> int:
    """Bytes of the files that no other step has."""
    return sum(file.nbytes for step in steps for file in step.files[:2])


def files_of(store: HubStore, step: int, branch: str = "resume") -> list[str]:
    """The large files of a step, as paths in the repo."""
    head = store.head(branch)
    assert head is not None
    return [
        e.path for e in store.list(head) if e.path.startswith(step_folder(step)) and e.path.endswith(".safetensors")
    ]


def held(hub: Hub) -> dict[str, int]:
    """What the server says that it keeps of the repo: sha256 to bytes."""
    found = hub.api()("GET", f"/api/models/{REPO}/lfs-files").json
    return {item["oid"]: item["size"] for item in found}


def stored_bytes(hub: Hub) -> int:
    """Bytes on the server's disk, outside its database, once garbage is collected."""
    hub.gc()
    return sum(path.stat().st_size for path in hub.root.rglob("*") if path.is_file() and ".sqlite" not in path.name)


def assert_readable(hub: Hub, step: Step) -> None:
    """Every byte of a step can be had, and is right."""
    found = branch_of(hub).verify(step.step)
    assert found.problems == ()
    assert found.nbytes == step.nbytes


# Looking


def test_steps_are_listed_with_what_they_are_and_when_they_were_saved(hub: Hub, store: HubStore) -> None:
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    steps = [save(store, 100, world=1), save(store, 200, world=3)]
    found = branch_of(hub).steps()
    assert [(one.step, one.world_size, one.problem) for one in found] == [(100, 1, None), (200, 3, None)]
    for one, step in zip(found, steps, strict=True):
        assert one.nbytes == step.nbytes + len(encode_step(step))
        assert one.files == len(step.files)
        assert one.saved_at is not None
        assert before <= one.saved_at <= datetime.now(timezone.utc)


def test_a_broken_step_is_listed_with_the_reason(hub: Hub, store: HubStore) -> None:
    save_all(store, 1, 2, 3)
    remove(store, "resume", files_of(store, 1)[0], f"{step_folder(2)}/manifest.json")
    one, two, three = branch_of(hub).steps()
    assert "missing: rank-00000-00001" in str(one.problem)
    assert "the save did not end" in str(two.problem)
    assert three.problem is None
    assert branch_of(hub).show().step.step == 3
    with pytest.raises(IncompleteError, match="missing: rank-00000"):
        branch_of(hub).show(1)


def test_what_is_not_there_is_named(hub: Hub, store: HubStore) -> None:
    with pytest.raises(NotFoundError, match="no branch 'resume'"):
        branch_of(hub).steps()
    save(store, 5)
    with pytest.raises(NotFoundError, match="no step-00000006"):
        branch_of(hub).show(6)
    with pytest.raises(NotFoundError, match="org/other does not exist"):
        StepBranch("org/other", token=TOKEN, endpoint=hub.url).steps()
    assert [one.step for one in branch_of(hub).steps()] == [5]


def test_a_step_is_shown_with_its_tensors_scalars_and_files(hub: Hub, store: HubStore) -> None:
    step = save(store, 7)
    found = branch_of(hub).show(7).step
    assert encode_step(found) == encode_step(step)
    assert found.tensors["model.weight"].spec.shape == (2 * ROWS, COLUMNS)
    assert found.scalars == {"epoch": 1, "lr": 0.5}
    assert found.metadata == {"by": "a test"}


# Checking


def test_a_step_is_verified_to_the_last_byte(hub: Hub, store: HubStore) -> None:
    step = save(store, 3)
    hub.reset_counters()
    events: list[Event] = []
    found = branch_of(hub, on_event=events.append).verify()
    assert (found.step, found.files, found.nbytes, found.problems) == (3, 3, step.nbytes, ())
    counted = hub.counters(f"models/{REPO}")
    assert counted["resolve_sent"] + counted["xet_sent"] >= step.nbytes
    assert sum(event.nbytes for event in events if event.kind == "received") == step.nbytes
    assert (events[0].kind, events[0].nbytes, events[-1].kind) == ("start", step.nbytes, "end")


def test_a_flipped_byte_in_storage_is_found_with_file_and_block(hub: Hub, tmp_path: Path) -> None:
    store = HubStore(REPO, token=TOKEN, endpoint=hub.url, xet=False)
    store.create_repo()
    step = save(store, 3)
    file = step.files[1]
    (stored,) = [path for path in hub.root.rglob(f"*{file.sha256}*") if path.is_file()]
    raw = bytearray(stored.read_bytes())
    raw[2 * file.block_bytes + 17] ^= 1
    stored.chmod(0o600)
    stored.write_bytes(raw)
    (problem,) = branch_of(hub).verify(3).problems
    assert problem.path == f"{step_folder(3)}/{file.name}"
    assert problem.what == "is not as it was saved in 1 block: 2 (bytes 131072 to 196608)"
    with pytest.raises(IntegrityError, match=r"1 block: 2 "):
        branch_of(hub).pull(3, tmp_path / "steps")
    assert list(LocalPlace(tmp_path / "steps").steps()) == [3]
    with pytest.raises(IncompleteError):
        LocalPlace(tmp_path / "steps").open(3)
    raw[2 * file.block_bytes + 17] ^= 1
    stored.write_bytes(raw)
    hub.reset_counters()
    branch_of(hub).pull(3, tmp_path / "steps")  # what was right before the block that was not is not fetched again
    assert LocalPlace(tmp_path / "steps").open(3).step == step
    counted = hub.counters(f"models/{REPO}")
    assert counted["resolve_sent"] < file.nbytes


def test_a_file_that_was_replaced_missing_or_deleted_for_good_is_found(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3)
    put(store, "resume", files_of(store, 1)[0], b"\0" * 1000)
    remove(store, "resume", files_of(store, 2)[1])
    gone = steps[3].files[0]
    body = {"deletions": {"sha": [gone.sha256], "rewriteHistory": False}}
    assert hub.api()("POST", f"/api/models/{REPO}/lfs-files/batch", body).status == 200
    found = {number: branch_of(hub).verify(number).problems for number in (1, 2, 3)}
    assert "has 1000 bytes, not" in found[1][0].what
    assert "missing: rank-00001" in found[2][0].what
    assert [problem.path for problem in found[3]] == [f"{step_folder(3)}/{gone.name}"]


# Pulling


def test_a_step_is_pulled_whole_and_a_second_time_costs_nothing(hub: Hub, store: HubStore, tmp_path: Path) -> None:
    step = save(store, 9)
    save(store, 10)
    folder = branch_of(hub).pull(9, tmp_path / "steps")
    assert folder == tmp_path / "steps" / step_folder(9)
    opened = LocalPlace(tmp_path / "steps").open(9)
    assert (opened.step, opened.ignored) == (step, ())
    assert {path.name for path in folder.iterdir()} == {*step.file_of, "manifest.json"}
    for file in step.files:
        assert hashlib.sha256((folder / file.name).read_bytes()).hexdigest() == file.sha256
    hub.reset_counters()
    branch_of(hub).pull(9, tmp_path / "steps")
    counted = hub.counters(f"models/{REPO}")
    assert counted["xet_sent"] == 0
    assert counted["resolve_sent"] < 20_000  # its manifest


def test_no_step_is_pulled_into_the_folder_of_a_run_and_no_run_begins_in_that_of_a_pull(
    hub: Hub, store: HubStore, tmp_path: Path
) -> None:
    save(store, 9)
    run, seen = FolderLock(tmp_path, "run"), []
    run.acquire()
    with pytest.raises(ConflictError, match=r"is in use: another .* saves there") as refused:
        branch_of(hub).pull(9, tmp_path)
    assert refused.value.hint == "end it first; or pull into a folder that no run uses"
    assert not (tmp_path / step_folder(9)).exists()
    run.release()
    branch_of(hub, on_event=lambda event: seen.append((event.kind, run.holder()))).pull(9, tmp_path)
    assert all(holder is not None and holder.startswith("a pull (") for kind, holder in seen if kind == "received")
    assert "received" in dict(seen)
    assert run.holder() is None


def test_a_file_that_is_wrong_on_the_disk_is_fetched_again(hub: Hub, store: HubStore, tmp_path: Path) -> None:
    step = save(store, 9)
    folder = branch_of(hub).pull(None, tmp_path)
    path = folder / step.files[0].name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    branch_of(hub).pull(9, tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == step.files[0].sha256


def test_another_step_of_the_same_number_is_not_written_over(hub: Hub, store: HubStore, tmp_path: Path) -> None:
    save(store, 9)
    save(store, 9, branch="other", world=1)
    branch_of(hub).pull(9, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / step_folder(9)).iterdir()}
    with pytest.raises(ConflictError, match="holds another step 9"):
        branch_of(hub, "other").pull(9, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / step_folder(9)).iterdir()} == before


PULL = """
import os, sys
from hubshard.steps.branch import StepBranch
left = int(sys.argv[3])
def on_event(event):
    global left
    if event.kind == "received":
        left -= event.nbytes
        if left < 0:
            os.kill(os.getpid(), 9)
StepBranch("org/run", token="hf_test", endpoint=sys.argv[1], on_event=on_event).pull(9, sys.argv[2])
"""


def test_a_pull_that_was_killed_goes_on_from_the_blocks_that_arrived(hub: Hub, tmp_path: Path) -> None:
    store = HubStore(REPO, token=TOKEN, endpoint=hub.url, xet=False)
    store.create_repo()
    save(store, 9, world=1)
    big = TensorSpec("model.big", "U8", (12, 2**20))
    stream = PieceStream(
        plan_files([Part(big, big.box)], max_file_bytes=10**9)[0],
        stem="rank-00000-00001",
        read=lambda part, box: content(part.spec, box, "big"),
        block_bytes=2**20,
    )
    staged = stage_stream(store, "resume", stream, step=9)
    step = merge([stream.receipt], step=9, world_size=1, scalars={}, paths={}, metadata={})
    gone = files_of(store, 9)
    commit_step(
        store, "resume", parent=store.head("resume"), step=step, raw=encode_step(step), staged=[staged], remove=gone
    )
    killed = hub.try_client(PULL, hub.url, tmp_path / "steps", str(7 * 2**20))
    assert killed.returncode == KILLED
    assert {path.suffix for path in (tmp_path / "steps" / step_folder(9)).iterdir()} == {".part"}
    hub.reset_counters()
    branch_of(hub).pull(9, tmp_path / "steps")
    assert LocalPlace(tmp_path / "steps").open(9).step == step
    assert hub.counters(f"models/{REPO}")["resolve_sent"] < 7 * 2**20


def test_two_pulls_into_one_folder_do_no_harm(hub: Hub, store: HubStore, tmp_path: Path) -> None:
    step = save(store, 9)

    def pull() -> None:
        while True:
            try:
                branch_of(hub).pull(9, tmp_path)
            except OSError as error:
                assert "another pull" in str(error)  # noqa: PT017
            else:
                return

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(pull) for _ in range(2)]:
            done.result()
    folder = tmp_path / step_folder(9)
    assert {path.name for path in folder.iterdir()} == {*step.file_of, "manifest.json"}
    for file in step.files:
        assert hashlib.sha256((folder / file.name).read_bytes()).hexdigest() == file.sha256


# Pruning


def test_prune_removes_the_steps_past_the_retention_in_one_commit(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 10, 20, 30, 40, 50)
    head = store.head("resume")
    planned = branch_of(hub).prune(keep=2, keep_every=20, pinned={10}, dry_run=True)
    assert store.head("resume") == head
    done = branch_of(hub).prune(keep=2, keep_every=20, pinned={10})
    assert (planned.kept, planned.removed) == (done.kept, done.removed) == ((10, 20, 40, 50), (30,))
    assert done.nbytes == steps[30].nbytes + len(encode_step(steps[30]))
    assert done.freed is None
    after = store.head("resume")
    assert after is not None
    assert after.commit == done.commit != planned.commit
    assert [one.step for one in branch_of(hub).steps()] == [10, 20, 40, 50]
    assert branch_of(hub).prune(keep=4).removed == ()
    assert store.head("resume") == after


def test_prune_leaves_broken_steps_and_does_not_count_them_unless_it_is_told_to_remove_them(
    hub: Hub, store: HubStore
) -> None:
    save_all(store, 1, 2, 3, 4)
    remove(store, "resume", f"{step_folder(2)}/manifest.json", files_of(store, 4)[0])
    done = branch_of(hub).prune(keep=2)
    assert (done.kept, done.removed, done.broken) == ((1, 2, 3, 4), (), (2, 4))
    done = branch_of(hub).prune(keep=1, remove_broken=True)
    assert (done.kept, done.removed, done.broken) == ((3,), (1, 2, 4), ())


def test_a_step_of_a_newer_format_is_never_removed_unasked(hub: Hub, store: HubStore) -> None:
    save_all(store, 1, 2, 3)
    put(store, "resume", f"{step_folder(1)}/manifest.json", b'{"format":"hubshard-step","step":{},"version":2}\n')
    done = branch_of(hub).prune(keep=1)
    assert (done.kept, done.removed, done.broken) == ((1, 3), (2,), (1,))


def test_prune_of_a_branch_that_moves_meanwhile_is_a_conflict_and_removes_nothing(hub: Hub, store: HubStore) -> None:
    save_all(store, 1, 2, 3)

    def save_another(event: Event) -> None:
        if event.kind == "start":
            save(store, 4)

    with pytest.raises(ConflictError, match="'Step 4'"):
        branch_of(hub, on_event=save_another).prune(keep=1)
    assert [one.step for one in branch_of(hub).steps()] == [1, 2, 3, 4]


def test_rollback_removes_what_is_newer_and_refuses_a_step_that_is_broken(hub: Hub, store: HubStore) -> None:
    save_all(store, 1, 2, 3, 4)
    remove(store, "resume", files_of(store, 1)[0])
    head = store.head("resume")
    with pytest.raises(IncompleteError):
        branch_of(hub).rollback(1)
    with pytest.raises(NotFoundError):
        branch_of(hub).rollback(9)
    assert branch_of(hub).rollback(2, dry_run=True) == (3, 4)
    assert store.head("resume") == head
    assert branch_of(hub).rollback(2) == (3, 4)
    assert [one.step for one in branch_of(hub).steps()] == [1, 2]
    assert branch_of(hub).rollback(2) == ()


# Giving storage back


def test_squash_frees_the_storage_of_steps_that_are_gone_and_keeps_the_rest_readable(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3, 4, 5)
    before = stored_bytes(hub)
    done = branch_of(hub).prune(keep=2)
    assert stored_bytes(hub) > before - 1000  # a commit frees nothing
    assert done.freed is None
    planned = branch_of(hub).squash(dry_run=True)
    assert len(held(hub)) == 5 * 2 + 1  # the one that never changes is stored once
    freed = branch_of(hub).squash()
    assert freed == planned == Freed(6, moving_bytes(steps[1], steps[2], steps[3]))
    assert held(hub).keys() == {file.sha256 for number in (4, 5) for file in steps[number].files}
    assert before - stored_bytes(hub) > 0.9 * freed.nbytes
    for number in (4, 5):
        assert_readable(hub, steps[number])
    found = branch_of(hub).steps()
    assert [(one.step, one.saved_at) for one in found] == [(4, None), (5, None)]
    assert len(hub.api()("GET", f"/api/models/{REPO}/commits/resume").json) == 1
    assert branch_of(hub).squash() == Freed(0, 0)


def test_prune_and_squash_in_one_call_and_a_run_that_saves_on_afterwards(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3)
    planned = branch_of(hub).prune(keep=1, squash=True, dry_run=True)
    assert len(held(hub)) == 7
    done = branch_of(hub).prune(keep=1, squash=True)
    assert done.freed == planned.freed == Freed(4, moving_bytes(steps[1], steps[2]))
    steps[4] = save(store, 4)
    assert_readable(hub, steps[3])
    assert_readable(hub, steps[4])


def test_what_another_branch_a_tag_a_pull_request_or_the_history_of_main_names_is_never_deleted(
    hub: Hub, store: HubStore
) -> None:
    steps = save_all(store, 1, 2, 3, 4, 5, 6)
    head = store.head("resume")
    assert head is not None
    one, two, three, four = (steps[number].files[0] for number in (1, 2, 3, 4))
    moved = {number: files_of(store, number)[0] for number in (1, 2, 3, 4)}
    api = hub.api()
    repo = f"models/{REPO}"

    def line(number: int, path: str) -> tuple[str, dict[str, object]]:
        file = steps[number].files[0]
        return "lfsFile", {"path": path, "algo": "sha256", "oid": file.sha256, "size": file.nbytes}

    assert api.commit(repo, line(1, "model.safetensors")).status == 200  # on main now
    assert api.commit(repo, line(2, moved[2])).status == 200  # in the history of main
    assert api.commit(repo, ("deletedFile", {"path": moved[2]})).status == 200
    assert api.commit(repo, line(3, moved[3]), query="?create_pr=1").status == 200  # in a pull request
    assert api.commit(repo, line(4, moved[4])).status == 200  # under a tag
    main = store.head("main")
    assert main is not None
    store.tag("v1", main)
    assert api.commit(repo, ("deletedFile", {"path": moved[4]})).status == 200
    refs = {**store.branches(), **store.tags()}

    done = branch_of(hub).prune(keep=1, squash=True)
    assert done.removed == (1, 2, 3, 4, 5)
    assert done.freed is not None
    still = held(hub).keys()
    assert {one.sha256, two.sha256, three.sha256, four.sha256} <= still
    assert not {file.sha256 for file in steps[5].files[:2]} & still
    assert done.freed.files == 2 * 5 - 4
    after = {**store.branches(), **store.tags()}
    assert {name: commit for name, commit in after.items() if name != "resume"} == {
        name: commit for name, commit in refs.items() if name != "resume"
    }
    for revision, path, file in (("main", "model.safetensors", one), ("v1", moved[4], four)):
        at = store.head(revision)
        assert at is not None
        raw = bytearray(file.nbytes)
        store.read(at, path, 0, file.nbytes, memoryview(raw))
        assert hashlib.sha256(raw).hexdigest() == file.sha256
    assert_readable(hub, steps[6])


def test_a_branch_that_began_at_an_old_step_keeps_its_files(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2)
    old = store.head("resume")
    assert old is not None
    store.create_branch("experiment", old)
    save_all(store, 3)
    done = branch_of(hub).prune(keep=1, squash=True)
    assert done.freed == Freed(0, 0)
    assert branch_of(hub, "experiment").verify(1).problems == ()
    assert branch_of(hub, "experiment").prune(keep=1, squash=True).removed == (1,)
    assert branch_of(hub, "experiment").verify(2).problems == ()
    assert not {file.sha256 for file in steps[1].files[:2]} & held(hub).keys()


PRUNE = """
import os, sys
from hubshard.steps.branch import StepBranch
def on_event(event):
    if event.kind == "squash":
        os.kill(os.getpid(), 9)
branch = StepBranch("org/run", token="hf_test", endpoint=sys.argv[1], on_event=on_event)
branch.prune(keep=1, squash=True)
"""


@pytest.mark.parametrize("saves_between", [False, True])
def test_what_a_kill_between_squash_and_deletion_leaves_is_freed_by_the_next_prune(
    hub: Hub, store: HubStore, saves_between: bool
) -> None:
    steps = save_all(store, 1, 2, 3)
    assert hub.try_client(PRUNE, hub.url).returncode == KILLED
    assert len(hub.api()("GET", f"/api/models/{REPO}/commits/resume").json) == 1
    assert len(held(hub)) == 7
    if saves_between:
        steps |= save_all(store, 4, 5)
    done = branch_of(hub).prune(keep=1)  # without squash
    assert done.freed == Freed(4, moving_bytes(steps[1], steps[2]))
    assert not {file.sha256 for number in (1, 2) for file in steps[number].files[:2]} & held(hub).keys()
    assert_readable(hub, steps[max(steps)])


def test_two_at_once_do_no_harm(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3, 4)
    branch_of(hub).prune(keep=1)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(branch_of(hub).squash) for _ in range(2)]:
            done.result()
    assert held(hub).keys() == {file.sha256 for file in steps[4].files}
    assert_readable(hub, steps[4])


def test_a_branch_that_holds_more_than_steps_keeps_its_history(hub: Hub, store: HubStore) -> None:
    save_all(store, 1, 2)
    put(store, "resume", "notes/README.txt", b"what came of it\n")
    head = store.head("resume")
    for call in (branch_of(hub).squash, lambda: branch_of(hub).prune(keep=1, squash=True)):
        with pytest.raises(FormatError, match=r"more than steps \(notes/README.txt\)"):
            call()
    assert store.head("resume") == head
    assert branch_of(hub).prune(keep=1).removed == (1,)


def test_a_save_that_lands_while_storage_is_freed_loses_nothing(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3)
    branch_of(hub).prune(keep=1)

    def save_another(event: Event) -> None:
        if event.kind == "squash":
            steps[4] = save(store, 4)

    branch_of(hub, on_event=save_another).squash()
    assert not {file.sha256 for number in (1, 2) for file in steps[number].files[:2]} & held(hub).keys()
    assert_readable(hub, steps[3])
    assert_readable(hub, steps[4])


def test_lost_answers_while_steps_are_pruned_and_storage_is_freed_do_no_harm(hub: Hub, store: HubStore) -> None:
    steps = save_all(store, 1, 2, 3)
    events: list[Event] = []
    with proxied(hub.port) as proxy:
        for line in (r"POST .*/commit/resume", r"POST .*/super-squash/resume", r"POST .*/lfs-files/batch"):
            proxy.fail(line, lose)
        branch = StepBranch(REPO, token=TOKEN, endpoint=proxy.url, on_event=events.append)
        done = branch.prune(keep=1, squash=True)
        assert proxy.faults == []
    assert (done.removed, done.freed) == ((1, 2), Freed(4, moving_bytes(steps[1], steps[2])))
    assert [event.kind for event in events].count("retry") >= 2
    assert held(hub).keys() == {file.sha256 for file in steps[3].files}
    assert_readable(hub, steps[3])


def test_a_training_that_saves_while_its_branch_is_pruned_and_squashed_loses_nothing(hub: Hub, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"moving": torch.zeros(100_000), "frozen": torch.ones(100_000)}
    over = threading.Event()

    def look_after() -> int:
        squashed = 0
        while not over.is_set():
            try:
                branch_of(hub).prune(keep=2, squash=True)
            except ConflictError:
                continue  # a step was saved just then: nothing was removed
            squashed += 1
        return squashed

    with (
        ThreadPoolExecutor(1) as pool,
        resume.ResumeBranch(REPO, local_dir=tmp_path / "here", keep=3, token=TOKEN, endpoint=hub.url) as run,
    ):
        try:
            run.save(state, 1)
            run.wait()
            looking = pool.submit(look_after)
            for step in range(2, 11):
                state["moving"] += 1
                run.save(state, step)
                if step % 2:
                    run.wait()
            run.wait()
        finally:
            over.set()
        assert looking.result() > 0
    for found in branch_of(hub).steps():
        assert branch_of(hub).verify(found.step).problems == ()
    restored = {"moving": torch.zeros(100_000), "frozen": torch.zeros(100_000)}
    with resume.ResumeBranch(REPO, local_dir=tmp_path / "elsewhere", token=TOKEN, endpoint=hub.url) as run:
        assert run.restore(restored) == 10
    assert all(torch.equal(restored[name], state[name]) for name in state)
