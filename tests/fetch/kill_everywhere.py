"""A program: pulls a revision over another one in forked children, each of which kills itself one step later.

Arguments: "cache" or "directory", an empty folder, the name of the new revision. Prints what was seen, as JSON.
A step is what Python's audit hooks report below the target: a file opened, renamed, linked, cut or removed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hubshard.events import ignore
from hubshard.fetch.folder import FolderLayout
from hubshard.fetch.hf_cache import CacheLayout
from hubshard.fetch.layout import Layout
from hubshard.fetch.pulling import pull_from

sys.path.insert(0, str(Path(__file__).parent))
if TYPE_CHECKING:
    from tests.fetch import memory_hub
else:
    import memory_hub

assert sys.platform != "win32"  # it forks

STEPS = {"open", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.mkdir", "os.rmdir"}
STEPS |= {"shutil.copyfile", "shutil.rmtree"}
WORKERS = 2
ENDED_WHOLE = 0


def main(kind: str, folder: Path, change: str) -> None:
    is_pipeline = "pipeline" in change
    old, new = memory_hub.REVISIONS["old pipeline" if is_pipeline else "old"](), memory_hub.REVISIONS[change]()
    seen = {"steps": 0, "old": 0, "new": 0, "nothing": 0, "mixtures": 0, "nbytes_again": 0, "left_behind": 0}
    while True:
        seen["steps"] += 1
        target = folder / str(seen["steps"])
        hub = memory_hub.MemoryHub()
        hub.put(old)
        pull_from(hub, layout_of(kind, target), memory_hub.request(workers=WORKERS))
        hub.put(new)
        status = in_child(kind, target, hub, die_at=seen["steps"])
        for view in looks_of(kind, target, is_pipeline=is_pipeline) or [None]:
            seen["nothing"] += view is None
            seen["old"] += is_part(view, old)
            seen["new"] += is_part(view, new)
            seen["mixtures"] += view is not None and not is_part(view, old) and not is_part(view, new)
        check_rerun(kind, target, hub, new, seen)
        shutil.rmtree(target)
        if status == ENDED_WHOLE:
            break
    print(json.dumps(seen))


def layout_of(kind: str, target: Path) -> Layout:
    if kind == "cache":
        return CacheLayout(target, "org/model")
    return FolderLayout(target, "org/model", variant=None, on_event=ignore)


def in_child(kind: str, target: Path, hub: memory_hub.MemoryHub, *, die_at: int) -> int:
    """Pull in a child that dies at a step; its status, which is `ENDED_WHOLE` where it has fewer steps."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(killer(str(target), die_at))
        pull_from(hub, layout_of(kind, target), memory_hub.request(workers=WORKERS))
        os._exit(ENDED_WHOLE)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {ENDED_WHOLE, -signal.SIGKILL}, status
    return status


def killer(below: str, die_at: int) -> memory_hub.Hook:
    steps, lock = 0, threading.Lock()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal steps
        if event in STEPS and arguments and str(arguments[0]).startswith(below):
            with lock:
                steps += 1
                if steps == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    return hook


def looks_of(kind: str, target: Path, *, is_pipeline: bool) -> list[dict[str, bytes] | None]:
    """What a loader would load, from wherever it may look: of a pipeline, all of it or a component."""
    snapshots = target / "models--org--model" / "snapshots"
    folders = [target] if kind == "directory" else sorted(snapshots.iterdir())
    if not is_pipeline:
        return [memory_hub.whole_model(folder) for folder in folders]
    components = [memory_hub.whole_component(folder, "unet") for folder in folders]
    return components + [memory_hub.whole_pipeline(folder) for folder in folders]


def is_part(view: dict[str, bytes] | None, files: dict[str, bytes]) -> bool:
    return view is not None and all(files.get(name) == content for name, content in view.items())


def check_rerun(
    kind: str, target: Path, hub: memory_hub.MemoryHub, new: dict[str, bytes], seen: dict[str, int]
) -> None:
    """The next run completes what the killed one began, and fetches little again."""
    hub.nbytes_read = 0
    shown = pull_from(hub, layout_of(kind, target), memory_hub.request(workers=WORKERS))
    assert memory_hub.held(shown) == new
    seen["nbytes_again"] = max(seen["nbytes_again"], hub.nbytes_read if seen["new"] else 0)
    private = layout_of(kind, target).private
    names = {path.name for path in private.iterdir()}
    seen["left_behind"] += len(names - {"lock", "listings", "pulled.json"})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
