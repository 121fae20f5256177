"""Train, push, lose the machine, restore from the Hub, go on, promote, load, generate: as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm
from tests.faults.models import Repo, new_repo
from tests.old_torch import fsdp2_on_cpu
from tests.systems import KILLED, posix_only

if TYPE_CHECKING:
    from tests.conftest import Hub

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytestmark = posix_only

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
) -> None:
    """Run the ranks on a machine. Where one dies, all do."""
    out.mkdir(parents=True, exist_ok=True)
    argv = [SCRIPT, repo, machine / "checkpoints", out, str(stop), str(dies)]
    ranks = world if world > 1 else 0
    done = warm.run(argv, imports="torch", ranks=ranks, env={**env, "OMP_NUM_THREADS": "1"}, timeout=280)
    log = done.stdout + done.stderr
    if dies:
        assert done.returncode == (KILLED if world == 1 else 1), log[-4000:]
    else:
        assert done.returncode == 0, log[-6000:]


def losses(out: Path, rank: int = 0) -> dict[int, str]:
    return dict(json.loads((out / f"rank{rank}.json").read_text())["losses"])


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=fsdp2_on_cpu)])
def test_a_run_that_loses_its_machine_ends_as_one_that_does_not(hub: Hub, tmp_path: Path, world: int) -> None:
    machine: Callable[[str], Path] = lambda name: tmp_path / name  # noqa: E731
    env: Callable[[str], dict[str, str]] = lambda name: hub.client_env(machine(name) / "hf")  # noqa: E731
    calm = machine("calm")
    train(env("calm"), "", calm, calm, world=world)

    repo: Repo = new_repo(hub)
    hub.api()("PUT", f"/api/models/{repo.repo_id}/settings", {"private": True})
    first = machine("first")
    train(env("first"), repo.repo_id, first, first, world=world, dies=DIES)
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

    argv = ["-m", "hubshard", "promote", repo.repo_id, "--step", str(STEPS), "--tag", "v1", "--json"]
    done = warm.run(argv, imports="client", env=env("third"), timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"] is True
    assert repo.titles()[:2] == [f"Promote step {STEPS}", "Before the training"]

    shown = hub.client(LOAD, repo.repo_id, calm, "v1", home=machine("fourth"))
    (generated,) = json.loads(shown.splitlines()[-1])
    assert len(generated) == len(b"def wrap(") + 12
