"""A process that commits to a directory is killed at each of its steps: the directory is the old or the new, whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hubshard.store.local import LocalStore
from hubshard.store.local_swap import locked, recover, workspace_of
from tests import warm
from tests.systems import KILLED

OLD = {"config.json": b"old", "keep.bin": b"k" * 100_000, "gone/a.bin": b"old"}
NEW = {"config.json": b"new", "keep.bin": b"k" * 100_000, "added/b.bin": b"n" * 300_000}

WRITER = """
import os, sys
from pathlib import Path
from hubshard.store.local import LocalStore

root, fatal = Path(sys.argv[1]), int(sys.argv[2])
taken = []

def on_step(step):
    taken.append(step)
    if len(taken) == fatal:
        os.kill(os.getpid(), 9)

store = LocalStore(root, on_step=on_step)
files = {"config.json": b"new", "added/b.bin": b"n" * 300_000}
add = [
    store.stage("main", path, lambda: [content[:1000], content[1000:]], nbytes=len(content))
    for path, content in files.items()
]
store.commit("main", parent=store.head("main"), add=add, remove=["gone/a.bin"], message="m", publish_id="p")
print("\\n".join(taken))
"""

exchanges_names = pytest.mark.skipif(sys.platform == "win32", reason="there a kill may come between two renames")


def files_in(root: Path) -> dict[str, bytes]:
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def make(root: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def write(root: Path, fatal: int) -> subprocess.CompletedProcess[str]:
    return warm.run(["-c", WRITER, root, str(fatal)], imports="client", timeout=60)


@exchanges_names
def test_a_kill_at_each_step_leaves_the_old_or_the_new_and_the_next_run_completes(tmp_path: Path) -> None:
    make(tmp_path / "whole", OLD)
    done = write(tmp_path / "whole", 0)
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path / "whole") == NEW
    steps = done.stdout.split()
    assert {"part", "staged", "build", "add", "sync", "ready", "swap", "remove"} <= set(steps)
    for fatal, step in enumerate(steps, start=1):
        place = tmp_path / f"{fatal}-{step}"
        make(place / "model", OLD)
        assert write(place / "model", fatal).returncode == KILLED, step
        assert files_in(place / "model") in (OLD, NEW), step
        again = write(place / "model", 0)
        assert again.returncode == 0, again.stderr
        assert files_in(place / "model") == NEW, step
        assert list(place.iterdir()) == [place / "model"], step


@exchanges_names
def test_a_kill_at_each_step_of_the_first_commit_leaves_nothing_or_all(tmp_path: Path) -> None:
    written = {path: content for path, content in NEW.items() if path != "keep.bin"}
    steps = write(tmp_path / "whole", 0).stdout.split()
    assert files_in(tmp_path / "whole") == written
    for fatal, step in enumerate(steps, start=1):
        place = tmp_path / f"{fatal}-{step}"
        place.mkdir()
        assert write(place / "model", fatal).returncode == KILLED, step
        assert LocalStore(place / "model").head("main") is None or files_in(place / "model") == written, step
        assert write(place / "model", 0).returncode == 0, step
        assert files_in(place / "model") == written, step
        assert list(place.iterdir()) == [place / "model"], step


@pytest.mark.parametrize("left", ["before the swap", "between two renames", "after the swap", "undone"])
def test_what_systems_without_an_exchange_of_names_leave_is_finished_or_undone(tmp_path: Path, left: str) -> None:
    root = tmp_path / "model"
    workspace = workspace_of(root)
    if left in {"before the swap", "after the swap"}:
        make(root, OLD if left == "before the swap" else NEW)
    if left in {"before the swap", "between two renames"}:
        make(workspace / "ready", NEW)
    if left != "before the swap":
        make(workspace / "old", OLD)
    make(workspace / "new", {"half.bin": b""})
    expected = OLD if left in {"before the swap", "undone"} else NEW
    if left in {"between two renames", "undone"}:  # a look is enough where there is no directory
        assert LocalStore(root).head("main") is not None
        assert files_in(root) == expected
    with locked(root):
        recover(root)
    assert files_in(root) == expected
    assert {file.name for file in workspace.iterdir()} <= {"lock"}  # of Windows


def test_what_was_staged_before_a_kill_is_not_written_again(tmp_path: Path) -> None:
    make(tmp_path / "model", OLD)
    steps = write(tmp_path / "model-2", 0).stdout.split()
    assert write(tmp_path / "model", steps.index("build") + 1).returncode == KILLED
    store = LocalStore(tmp_path / "model")
    (staged,) = workspace_of(tmp_path / "model").glob("staged-*")
    sha256 = max(staged.iterdir(), key=lambda file: file.stat().st_size).name
    again = store.stage("main", "added/b.bin", _never, nbytes=300_000, sha256=sha256)
    assert again.nbytes_sent == 0


def _never() -> list[bytes]:
    raise AssertionError("the content was asked for")
