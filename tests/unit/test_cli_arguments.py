"""Arguments that scripts give by accident, and errors of the system: said in a line, before anything is done."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from hubshard.cli.app import app, main
from hubshard.cli.common import a_directory, a_path
from hubshard.cli.failing import hint_of, message_of
from hubshard.errors import FormatError, IntegrityError, StoreError

Run = Callable[..., tuple[int, str, str]]


def _commands(group: Any, name: str = "hubshard") -> Iterator[tuple[str, Any]]:
    for verb, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}", command


def test_every_option_that_takes_something_says_what_in_a_word() -> None:
    wordless = [
        f"{name} {option.opts[0]}"
        for name, command in _commands(typer.main.get_command(app))
        for option in command.params
        if option.param_type_name == "option" and not option.is_flag and option.opts != ["--help"]
        if option.metavar is None and not isinstance(option.default, Enum)
    ]
    assert wordless == []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs the command line in an empty directory, against a Hub that is not there; status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hubshard", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


def _verbs(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., object]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _verbs(inner.typer_instance, (*path, str(inner.name)))


def _path_options(verb: Callable[..., object]) -> Iterator[tuple[str, Any]]:
    for name, parameter in signature(verb, eval_str=True).parameters.items():
        kind, *described = get_args(parameter.annotation)
        if kind is Path or Path in get_args(kind):
            yield f"--{name.replace('_', '-')}", described[0]


PATHS = [(path, *found) for path, verb in _verbs(app) for found in _path_options(verb)]


def test_every_option_that_takes_a_path_takes_it_in_the_same_way() -> None:
    assert len(PATHS) > 20
    assert all(described.parser in {a_path, a_directory} for _, _, described in PATHS)


@pytest.mark.parametrize(
    ("verb", "option"), [found[:2] for found in PATHS], ids=lambda value: "".join(value).strip("-")
)
def test_an_empty_path_is_not_the_current_directory(
    run: Run, tmp_path: Path, verb: tuple[str, ...], option: str
) -> None:
    needed = {"rollback": ["--to", "1"], "advise": ["1m", "--mtbf", "1h"], "diff": ["a"], "publish": ["m"]}
    code, said, told = run(*verb, "org/name", *needed.get(verb[-1], []), f"{option}=")
    assert (code, said) == (2, "")
    assert "an empty text is no path: is a variable not set?" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pull", "org/name@"], "'org/name@' names no revision after the '@'"),
        (["pull", "org/name@v1", "--revision", "v2"], "two revisions are asked for, 'v1' and 'v2'"),
        (["pull", "org/name", "--revision", ""], "an empty text is no revision"),
        (["inspect", "org/name", "--revision", ""], "an empty text is no revision"),
        (["verify", ".", "--revision", ""], ". is a path, which has no revision ''"),
        (["rollback", "org/name", "--to", "v1", "--revision", " "], "an empty text is no revision"),
        (["promote", "org/name", "--branch", ""], "an empty text is no revision"),
        (["promote", "org/name", "--revision", "resume"], "'resume' holds the steps, and would be published to"),
        (["promote", "org/name", "--resume-repo", ""], "'' is no repo id"),
        (["promote", "org/name", "--local-dir", "nothing"], "nothing does not exist"),
        (["promote", "org/name", "--local-dir", "."], ". holds no steps"),
        (["hub", "serve", "--root", "hub", "--public-url", "nope"], "'nope' is no URL of a Hub"),
        (["resume", "list", "org/name@"], "'org/name@' names no revision after the '@'"),
        (["resume", "list", "org/name", "--branch", ""], "an empty text is no revision"),
        (["pull", "org/name", "--revision", "v\udcff"], r"the name 'v\udcff' holds bytes that are no text"),
        (
            ["rollback", "org/name", "--to", "v1", "-m", "v\udcff"],
            r"the message 'v\udcff' holds bytes that are no text",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_before_anybody_is_asked(run: Run, arguments: list[str], told: str) -> None:
    code, _, said = run(*arguments)
    assert code == 1
    assert said.splitlines()[0] == f"Error: {told}"


def test_a_file_in_the_place_of_a_directory_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, said = run("pull", "org/name", "--local-dir", "file")
    assert code == 2
    assert "'file' is a file, not a directory" in said


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "model.safetensors"),
        _caused(StoreError("cannot write", hint="see to the folder"), OSError(errno.EMFILE, "-")),
        StoreError("cannot upload: Os { code: 24, kind: TooManyOpenFiles }", hint="is the Hub reachable?"),
        StoreError("cannot look: [Errno 24] Too many open files"),
    ],
)
def test_too_many_open_files_are_said_to_be_that_wherever_they_come_from(error: Exception) -> None:
    assert hint_of(error) == "too many files were open; raise the limit: `ulimit -n 1024`"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_low_limit_of_open_files_is_mentioned_where_it_may_be_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    vague = StoreError("cannot upload: Internal error: builder error", hint="is the Hub reachable?")
    assert hint_of(vague) == (
        "is the Hub reachable?; only 64 files may be open, which may be why; raise the limit: `ulimit -n 1024`"
    )
    assert hint_of(FormatError("no size", hint="write it as 5GB")) == "write it as 5GB"
    assert hint_of(IntegrityError("differs")) is None


def test_an_error_of_the_system_names_the_file_and_what_to_do() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")
    assert message_of(error) == "out/model.safetensors: No space left on device"
    assert hint_of(error) == "free some space, or name another disk"
    assert message_of(OSError("just words")) == "just words"


def test_what_an_output_cannot_show_is_drawn_in_plain_characters() -> None:
    command = [sys.executable, "-m", "hubshard", "resume", "advise", "2m", "--mtbf", "4h"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"# saving" in done.stdout
