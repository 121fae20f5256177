"""The action's steps are killed at every point that matters, and the job is run again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.action.models import Repo, model, ok, publish
from tests.faults.models import equal, read_folder, weights
from tests.faults.proxy import Answer, Exchange, proxied

if TYPE_CHECKING:
    from tests.action.conftest import NewJob
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytestmark = pytest.mark.timeout(600)  # the first one installs, and the others wait for it

_CANDIDATE = r"POST /api/models/org/[\w-]+/commit/hubshard%2Fcandidate"
_RELEASE = r"POST /api/models/org/[\w-]+/commit/main"
_TAG = r"POST /api/models/org/[\w-]+/tag/"


@pytest.mark.parametrize(
    ("where", "is_done", "lost", "released"),
    [
        pytest.param(_CANDIDATE, True, True, False, id="candidate-machine"),
        pytest.param(_CANDIDATE, True, False, False, id="candidate-step", marks=pytest.mark.slow),
        pytest.param(_RELEASE, True, True, True, id="release-machine", marks=pytest.mark.slow),
        pytest.param(_TAG, False, False, True, id="tag-step"),
    ],
)
def test_a_killed_job_run_again_releases_once(
    module_hub: Hub,
    new_job: NewJob,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    where: str,
    is_done: bool,
    lost: bool,
    released: bool,
) -> None:
    repo = Repo(module_hub, f"org/killed-{request.node.callspec.id}")
    publish(repo, tag="v1")
    before = repo.heads
    with proxied(module_hub.port) as proxy:
        job = new_job(module_hub, endpoint=proxy.url)
        inputs = {**model(job, 1), "repo-id": repo.name, "tag": "v2"}
        if not released:
            (job.workspace / "out" / "draft.json").write_text("{}")  # not so in the build that is released

        def kill(exchange: Exchange) -> Answer:
            if is_done:
                exchange.forward()
            job.kill(lost=lost)
            return Answer(0)

        proxy.fail(where, kill)
        killed = job.run(inputs)
        proxy.settle()
        assert killed.outcome == "failure"
        assert not proxy.faults, "it was killed where it should be"
    shown = {name: commit for name, commit in repo.heads.items() if not name.startswith("hubshard/")}
    assert (shown == before) is not released
    assert "v2" not in shown
    received = repo.received(large=True)
    job = new_job(module_hub)
    (job.workspace / "out" / "draft.json").unlink(missing_ok=True)
    ran = ok(job.run(inputs))
    assert repo.heads == {**before, "main": ran.outputs["commit-oid"], "v2": ran.outputs["commit-oid"]}
    assert "draft.json" not in repo.files()
    assert repo.titles().count("Release v2") == 1
    assert ran.outputs["changed"] == ("false" if released else "true")
    assert repo.received(large=True) - received < 20_000, "no tensor is sent twice"
    assert equal(read_folder(Path(repo.api.snapshot_download(repo.name, local_dir=tmp_path / "pulled"))), weights(1))
