"""Values that would like to be commands, outputs, markup: nothing of them comes true."""

from __future__ import annotations

import html
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.action.conftest import ACTION
from tests.action.github_runner import commands, parse_outputs
from tests.action.models import TOKEN, Repo, model, ok

if TYPE_CHECKING:
    from tests.action.conftest import NewJob
    from tests.conftest import Hub

pytest.importorskip("starlette")
pytestmark = pytest.mark.timeout(600)  # the first one installs, and the others wait for it

INPUTS = sorted(yaml.safe_load((ACTION / "action.yml").read_text("utf-8"))["inputs"])
HOSTILE = """x"; touch pwned; $(touch pwned) `touch pwned` ' && touch pwned | touch pwned
commit-oid=pwned
::error::pwned
end<<EOF
pwned
EOF
--help %0A::set-output name=tag::pwned ${{ github.token }} <img src=x> | [x](javascript:x)"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """The action's own module of what it tells the runner."""
    spec = importlib.util.spec_from_file_location("action_runner", ACTION / "runner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [name for name in INPUTS if name not in {"check", "python-version"}])
def test_no_input_runs_and_none_passes_for_something_else(module_hub: Hub, new_job: NewJob, name: str) -> None:
    job = new_job(module_hub)
    inputs = {**model(job), "repo-id": "org/hostile", name: HOSTILE}
    if name in {"from-step", "rollback-to"}:
        del inputs["path"]
    if name == "hubshard-version":
        job.given = {}
    asked = module_hub.counters()
    ran = job.run(inputs, until="candidate")
    assert ran.outcome == "failure"
    assert list(job.workspace.glob("**/pwned")) == list(job.temp.glob("**/pwned")) == []
    (error,) = ran.annotations
    assert error[0] == "error"
    assert error[1].startswith(f"input {name}: ")
    assert {kind for kind, _ in commands(ran.log)} == {"error"}
    assert ran.steps[list(ran.steps)[-1]].outputs == {}
    assert module_hub.counters() == asked, "refused before anybody was asked"


def test_a_hostile_command_is_only_ever_the_check(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/judged")
    inputs = {**model(job), "repo-id": repo.name, "verify": "false", "check": "touch judged; echo ${{ inputs.token }}"}
    ran = job.run(inputs)
    assert ran.steps["check"].outcome == "failure", "bash does not know the runner's expressions"
    assert TOKEN not in ran.steps["check"].log
    assert (job.workspace / "judged").exists()
    assert repo.files() == set()


def test_a_folder_with_a_hostile_name_is_published_as_any_other(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/named")
    name = "-m out; touch pwned $(touch pwned)\n::error::pwned"
    ran = ok(job.run({**model(job, name=name), "repo-id": repo.name, "verify": "false"}))
    assert "model-00001-of-00004.safetensors" in repo.files()
    assert not list(job.workspace.glob("**/pwned"))
    assert [text for _, text in ran.annotations] == []


@pytest.mark.parametrize(
    "value", [HOSTILE, "", "\n", "a\n\nb\n", "name<<end\nx\nend", "ghadelimiter_x", "x=y", "é 你好", "\r\n"]
)
def test_every_value_comes_out_of_the_file_of_outputs_as_it_went_in(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    place = tmp_path / "outputs"
    monkeypatch.setenv("GITHUB_OUTPUT", str(place))
    runner.set_outputs({"first": value, "second": "after"})
    assert parse_outputs(place.read_bytes().decode()) == {"first": value, "second": "after"}


@pytest.mark.parametrize(
    "value",
    [
        HOSTILE,
        "**x**",
        "[a](http://b)",
        "<script>",
        "a|b\n| c",
        "`x`",
        "@org/team #1",
        "https://x.example www.x.example",
        "_a_",
    ],
)
def test_the_summary_shows_values_and_renders_none(runner: ModuleType, value: str) -> None:
    shown = runner.plain(value, most=1000)
    assert not set(shown) & set("<>|[]()*_`@\n\r:/.!~\\=")
    assert html.unescape(shown) == " ".join(value.split("\n"))


def test_what_a_verb_prints_is_no_command(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with runner.quietly():
        print("::error::pwned")
    runner.annotate("notice", "100% \n::error::x")
    log = capsys.readouterr().out
    assert "::error::pwned" in log
    assert commands(log) == [("notice", "100% \n::error::x")]


def test_modules_in_the_workspace_pass_for_nothing_that_the_action_imports(module_hub: Hub, new_job: NewJob) -> None:
    job, repo = new_job(module_hub), Repo(module_hub, "org/shadowed")
    for name in ("hubshard", "huggingface_hub", "inputs", "json", "pip", "rich", "runner", "safetensors", "typer"):
        (job.workspace / f"{name}.py").write_text("raise SystemExit('shadowed')")
    job.env["PYTHONPATH"] = str(job.workspace)
    ok(job.run({**model(job), "repo-id": repo.name}))
    assert "config.json" in repo.files()
