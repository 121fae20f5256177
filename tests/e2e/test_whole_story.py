"""Train, push, lose the machine, restore from the Hub, go on, promote, load, generate: as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.models import Repo, new_repo

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGKILL")

SCRIPT = Path(__file__).with_name("whole_story_script.py")
STEPS, SAVED, DIES = 10, 6, 8  # it saves every third step

LOAD = """
import sys, torch, transformers
from pathlib import Path
expected = torch.load(Path(sys.argv[2]) / "trained.pt", weights_only=True)
load = transformers.AutoModelForCausalLM.from_pretrained
model, info = load(sys.argv[1], revision=sys.argv[3], output_loading_info=True)
assert not any(info.values()), info
found = model.state_dict()
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
reference = transformers.AutoModelForCausalLM.from_config(model.config).eval()
reference.load_state_dict(expected)
prompt = torch.tensor([list(b"def wrap(")])
generated = model.generate(prompt, do_sample=False)
assert torch.equal(generated, reference.generate(prompt, do_sample=False, max_new_tokens=12))
print(generated.tolist())
"""


def train(
    env: dict[str, str], repo: str, machine: Path, out: Path, *, world: int, stop: int = STEPS, dies: int = 0
) -> int:
    """Run the ranks on a machine; the status of their launcher. Where one dies, all do."""
    command = [sys.executable, str(SCRIPT)]
    if world > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        command.append(str(SCRIPT))
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    with log.open("a") as file:
        done = subprocess.run(
            [*command, repo, str(machine / "checkpoints"), str(out), str(stop), str(dies)],
            env={**env, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            timeout=280,
            check=False,
        )
    if not dies:
        assert done.returncode == 0, log.read_text()[-6000:]
    return done.returncode


def losses(out: Path, rank: int = 0) -> dict[int, str]:
    return dict(json.loads((out / f"rank{rank}.json").read_text())["losses"])


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_loses_its_machine_ends_as_one_that_does_not(hub: Hub, tmp_path: Path, world: int) -> None:
    machine: Callable[[str], Path] = lambda name: tmp_path / name  # noqa: E731
    env: Callable[[str], dict[str, str]] = lambda name: hub.client_env(machine(name) / "hf")  # noqa: E731
    calm = machine("calm")
    train(env("calm"), "", calm, calm, world=world)

    repo: Repo = new_repo(hub)
    hub.api()("PUT", f"/api/models/{repo.repo_id}/settings", {"private": True})
    first = machine("first")
    status = train(env("first"), repo.repo_id, first, first, world=world, dies=DIES)
    assert status == (-signal.SIGKILL if world == 1 else 1), (first / "log.txt").read_text()[-4000:]
    assert not (first / "rank0.json").exists()
    shutil.rmtree(first)  # disk, cache and all

    second = machine("second")
    second.mkdir()
    (second / "published").touch()
    train(env("second"), repo.repo_id, second, second, world=world)
    for rank in range(world):
        record = json.loads((second / f"rank{rank}.json").read_text())
        assert record["restored"] == SAVED
        expected: dict[int, Any] = {step: loss for step, loss in losses(calm, rank).items() if step > SAVED}
        assert losses(second, rank) == expected

    command = [sys.executable, "-m", "hubshard", "promote", repo.repo_id, "--step", str(STEPS), "--tag", "v1", "--json"]
    done = subprocess.run(command, env=env("third"), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"] is True
    assert repo.titles()[:2] == [f"Promote step {STEPS}", "Before the training"]

    shown = hub.client(LOAD, repo.repo_id, calm, "v1", home=machine("fourth"))
    (generated,) = json.loads(shown.splitlines()[-1])
    assert len(generated) == len(b"def wrap(") + 12
