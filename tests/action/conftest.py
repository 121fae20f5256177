"""One installation of the action for all its tests, and jobs that use it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from hubshard.locks import wait_for_lock
from tests.action.github_runner import Job

if TYPE_CHECKING:
    from tests.conftest import Hub

ACTION = Path(__file__).parents[2] / ".github" / "actions" / "publish"


class NewJob(Protocol):
    """Makes a job that uses a Hub, or what stands before it."""

    def __call__(self, hub: Hub, *, endpoint: str | None = None, **env: str) -> Job: ...


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, str]:
    """The outputs of the action's own install step, run once for all processes of a test run."""
    if os.name == "nt":
        pytest.skip("the runner of these tests starts bash as Linux and macOS do")
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "action-installed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        wait_for_lock(lock.fileno())
        place = folder / "python"
        if not place.exists():
            ran = Job(ACTION, folder, folder).run({"repo-id": "org/model"}, until="install")
            assert ran.outcome == "success", ran.log
            place.write_text(ran.steps["install"].outputs["python"])
        return {"python": place.read_text()}


@pytest.fixture
def new_job(installed: dict[str, str], tmp_path: Path) -> NewJob:
    """Makes jobs that share a workspace, as runs of one workflow share a checkout."""

    def make(hub: Hub, *, endpoint: str | None = None, **env: str) -> Job:
        workspace = tmp_path / "workspace"
        workspace.mkdir(exist_ok=True)
        temp = tmp_path / f"temp-{len(list(tmp_path.iterdir()))}"
        temp.mkdir()
        client = {
            "HF_ENDPOINT": endpoint or hub.url,
            "HF_HOME": str(temp / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return Job(ACTION, workspace, temp, client | env, given={"install": installed})

    return make
