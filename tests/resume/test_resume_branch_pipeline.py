"""Stages of a pipeline, which hold different layers: refused under one ResumeBranch, saved and restored by one each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm
from tests.systems import posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("pipeline_script.py")
ROOT = Path(__file__).parents[2]


def launch(hub: Hub, folder: Path, repo: str, what: str, *, fails: bool = False) -> list[dict[str, Any]]:
    """Run two stages; what each found."""
    out = folder / "found"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (folder / "steps").mkdir(exist_ok=True)
    arguments = [SCRIPT, out, folder / "steps", repo, what]
    if fails:  # a rank is killed: what torchrun itself does then is part of it
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        env = hub.client_env() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*torchrun, *map(str, arguments)]
        died = subprocess.run(command, capture_output=True, check=False, text=True, timeout=250, env=env)
        assert died.returncode != 0, died.stdout[-2000:] + died.stderr[-6000:]
        assert "exitcode  : -9 " in died.stderr
        return []
    done = warm.run(arguments, imports="torch", ranks=2, env=hub.client_env(), timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def test_stages_under_one_resume_branch_are_refused_on_all_ranks_before_a_step_is_lost(
    module_hub: Hub, tmp_path: Path
) -> None:
    first, second = launch(module_hub, tmp_path, "org/refused", "refused")
    assert first == second
    lacks = "lacks layer0.bias, layer0.weight of the first rank and has layer1.bias, layer1.weight, which that lacks"
    for message, hint in (first["restore"], first["save"]):
        assert message == f"rank 1: model: it {lacks}"
        assert "a ResumeBranch of its own, with process_group=, branch= and local_dir=" in hint
        assert "TrainState" in hint
    assert (first["steps"], first["folder"]) == ([], False)


@posix_only
@pytest.mark.timeout(600)
def test_stages_with_a_branch_each_go_on_from_the_newest_step_that_all_have(module_hub: Hub, tmp_path: Path) -> None:
    whole = launch(module_hub, tmp_path / "whole", "org/whole-pipeline", "whole")
    assert [found["begun"] for found in whole] == [None, None]
    losses = whole[1]["losses"]
    assert list(losses) == [str(step) for step in range(1, 11)]

    folder, repo = tmp_path / "killed", "org/killed-pipeline"
    launch(module_hub, folder, repo, "killed", fails=True)
    shutil.rmtree(folder / "steps" / "stage-0")  # and that machine is lost
    told = launch(module_hub, folder, repo, "told")
    there = [{*found["there"]} for found in told]
    assert {4, 6} <= there[0]  # 2 may have been passed over, as the Hub had no time for it
    assert max(there[1]) == 4
    assert [found["begun"] for found in told] == [4, 4]
    assert [found["steps"][-2:] for found in told] == [[6, 7], [6, 7]]  # all stop where one is told to
    assert told[1]["losses"] == {step: losses[step] for step in ("5", "6", "7")}

    last = launch(module_hub, folder, repo, "whole")
    assert [found["begun"] for found in last] == [7, 7]
    assert last[1]["losses"] == {step: losses[step] for step in ("8", "9", "10")}
    assert [found["weight"] for found in last] == [found["weight"] for found in whole]
