"""Runs a composite action's steps as they stand, as GitHub's runner would: expressions, files for outputs, commands.

What it knows of expressions is what the action uses; anything else is an error, so that nothing is passed over.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.systems import kill_group

__all__ = ["Job", "Ran", "StepRan", "commands", "parse_outputs"]

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<name>[a-z][\w.-]*(?:\(\))?)|(?P<op>==|!=|&&|\|\||[()]))", re.IGNORECASE
)
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_COMMAND = re.compile(r"::(?P<name>[\w-]+)(?: (?P<properties>[^:]*))?::(?P<text>.*)")
_STEP_SECONDS = 500


@dataclass
class StepRan:
    """What became of a step."""

    outcome: str
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""
    summary: str = ""


@dataclass
class Ran:
    """What became of an action."""

    outcome: str
    outputs: dict[str, str]
    steps: dict[str, StepRan]

    @property
    def log(self) -> str:
        """What all steps printed."""
        return "".join(step.log for step in self.steps.values())

    @property
    def summary(self) -> str:
        """What all steps wrote into the run's summary."""
        return "".join(step.summary for step in self.steps.values())

    @property
    def annotations(self) -> list[tuple[str, str]]:
        """Kind and text of what is shown on the run's page."""
        return [(name, text) for name, text in commands(self.log) if name in {"error", "warning", "notice"}]

    @property
    def errors(self) -> str:
        """Texts of the errors among them."""
        return "\n".join(text for kind, text in self.annotations if kind == "error")


def commands(log: str) -> list[tuple[str, str]]:
    """What a log tells the runner to do: name and text; nothing between `stop-commands` and its word."""
    found, word = [], None
    for line in log.splitlines():
        match = _COMMAND.fullmatch(line.strip())
        if word is not None:
            word = None if line.strip() == f"::{word}::" else word
        elif match and match["name"] == "stop-commands":
            word = match["text"]
        elif match:
            text = match["text"].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
            found.append((match["name"], text))
        else:
            assert not line.startswith("##["), line
    return found


def parse_outputs(text: str) -> dict[str, str]:
    """A file of outputs, as the runner reads it: `name=value` or `name<<WORD`, lines, `WORD`."""
    found: dict[str, str] = {}
    lines = iter(text.split("\n"))
    for line in lines:
        if not line:
            continue
        name, joint, word = re.split(r"(=|<<)", line, maxsplit=1)
        found[name] = word if joint == "=" else "\n".join(_until(word, lines))
    return found


def _until(word: str, lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line == word:
            return
        yield line
    raise AssertionError(f"no line {word!r} ends the value")


Context = Mapping[str, Any]


def evaluate(text: str, context: Context) -> str:
    """A text with its `${{ }}` filled in."""
    return _EXPRESSION.sub(lambda match: _as_text(_Expression(match[1], context).value()), text)


class _Expression:
    """Recursive descent over the part of the language that the action uses."""

    def __init__(self, text: str, context: Context) -> None:
        self._context = context
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            assert match, f"{text!r} holds what this runner does not know"
            self._tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
            at = match.end()

    def value(self) -> Any:
        found = self._either()
        assert not self._tokens, self._tokens
        return found

    def _either(self) -> Any:
        found = self._both()
        while self._takes("||"):
            other = self._both()
            found = found or other
        return found

    def _both(self) -> Any:
        found = self._comparison()
        while self._takes("&&"):
            other = self._comparison()
            found = found and other
        return found

    def _comparison(self) -> Any:
        left = self._atom()
        for sign in ("==", "!="):
            if self._takes(sign):
                same = _as_text(left).casefold() == _as_text(self._atom()).casefold()
                return same == (sign == "==")
        return left

    def _atom(self) -> Any:
        if self._takes("("):
            found = self._either()
            assert self._takes(")")
            return found
        kind, text = self._tokens.pop(0)
        if kind == "text":
            return text[1:-1].replace("''", "'")
        assert kind == "name", text
        if text == "always()":
            return True
        return _looked_up(text, self._context)

    def _takes(self, operator: str) -> bool:
        if self._tokens[:1] != [("op", operator)]:
            return False
        del self._tokens[0]
        return True


def _looked_up(name: str, context: Context) -> Any:
    found: Any = context
    head = name.partition(".")[0]
    assert head in context, f"{name}: no context {head}"
    for part in name.split("."):
        found = found.get(part, "") if isinstance(found, Mapping) else ""
    return found


def _as_text(value: Any) -> str:
    return {True: "true", False: "false", None: ""}.get(value, value) if not isinstance(value, str) else value


@dataclass
class Job:
    """A job on a runner.

    Attributes:
        action: folder of the action.
        workspace: where its steps run.
        temp: RUNNER_TEMP.
        env: of the job, beside what the runner sets.
        event: of `github.event`.
        given: outputs of steps that are not run again: each job here installs the same.
    """

    action: Path
    workspace: Path
    temp: Path
    env: dict[str, str] = field(default_factory=dict)
    event: dict[str, Any] = field(default_factory=dict)
    given: dict[str, dict[str, str]] = field(default_factory=dict)
    group: int | None = None
    is_lost: bool = False

    def run(
        self, inputs: Mapping[str, str], *, until: str = "", before: Mapping[str, Callable[[], object]] | None = None
    ) -> Ran:
        """Run the action.

        Args:
            inputs: what stands under `with`.
            until: the last step to run; all by default.
            before: called before the steps of these names.
        """
        described = yaml.safe_load((self.action / "action.yml").read_text("utf-8"))
        context: dict[str, Any] = {"github": {"event": self.event}, "inputs": {}, "steps": {}}
        assert set(inputs) <= set(described["inputs"]), "an input that the action does not have"
        context["inputs"] = {
            name: inputs.get(name, evaluate(str(one.get("default", "")), {"github": context["github"]}))
            for name, one in described["inputs"].items()
        }
        for name, one in described["inputs"].items():
            assert not one.get("required") or name in inputs, f"{name} is required"
        ran: dict[str, StepRan] = {}
        for step in described["runs"]["steps"]:
            name = step["id"]
            if before and name in before:
                before[name]()
            ran[name] = self._step(step, context, has_failed=any(done.outcome == "failure" for done in ran.values()))
            context["steps"][name] = {"outputs": ran[name].outputs, "outcome": ran[name].outcome}
            if name == until or self.is_lost:
                break
        outputs = {name: evaluate(one["value"], context) for name, one in described["outputs"].items()}
        failed = any(done.outcome == "failure" for done in ran.values())
        return Ran("failure" if failed else "success", outputs, ran)

    def kill(self, *, lost: bool = False) -> None:
        """End the step that runs, and all that it started; with the whole machine, no step comes after it."""
        self.is_lost = lost
        if self.group is not None:
            with suppress(ProcessLookupError):
                kill_group(self.group)

    def _step(self, step: Mapping[str, Any], context: dict[str, Any], *, has_failed: bool) -> StepRan:
        condition = str(step.get("if", "true"))
        wanted = True if condition == "true" else _Expression(condition, context).value()
        if not wanted or (has_failed and "always()" not in condition):
            return StepRan("skipped")
        if "uses" in step:
            assert step["uses"].startswith("actions/setup-python@"), step["uses"]
            return StepRan("success", {"python-path": sys.executable})
        if step["id"] in self.given:
            return StepRan("success", self.given[step["id"]])
        return self._shell(step, context)

    def _shell(self, step: Mapping[str, Any], context: dict[str, Any]) -> StepRan:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
        files = {name: self.temp / f"{name.lower()}-{len(list(self.temp.iterdir()))}" for name in _FILES}
        for file in files.values():
            file.write_text("")
        script = self.temp / "step.sh"
        script.write_text(step["run"])
        own = {name: evaluate(str(value), context) for name, value in step.get("env", {}).items()}
        bash = shutil.which("bash") or "bash"
        started = subprocess.Popen(
            [bash, "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace,
            env=self._environment() | {name: str(file) for name, file in files.items()} | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )
        self.group = started.pid
        try:
            log, _ = started.communicate(timeout=_STEP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            started.communicate()
            raise
        assert files["GITHUB_ENV"].read_text() == files["GITHUB_PATH"].read_text() == ""
        return StepRan(
            "success" if started.returncode == 0 else "failure",
            parse_outputs(files["GITHUB_OUTPUT"].read_text("utf-8")),
            log,
            files["GITHUB_STEP_SUMMARY"].read_text("utf-8"),
        )

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG", "LC_"))
        }
        inherited.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))  # HOME is another one here
        return inherited | {
            "PATH": os.environ["PATH"],
            "HOME": str(self.temp),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(self.action),
            "GITHUB_WORKSPACE": str(self.workspace),
            "RUNNER_TEMP": str(self.temp),
            **self.env,
        }


_FILES = ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV", "GITHUB_PATH")
