"""The command line without a Hub: usage, errors, exit status, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from hubshard import __version__
from hubshard.header import encode_header
from hubshard.tensors import TensorSpec
from tests import warm


def _hubshard(
    *arguments: str,
    code: str = "from hubshard.cli import main; main()",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    return warm.run(["-c", code, *arguments], imports="client", env={**os.environ, **environment})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    specs = [TensorSpec("b[0].weight", "BF16", (3, 4)), TensorSpec("a", "F32", (5,)), TensorSpec("n", "I64", ())]
    raw = encode_header(specs, {"format": "pt", "head": "a"}) + bytes(range(24 + 20 + 8))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(raw)
    return tmp_path / "model"


def test_the_version_goes_to_stdout() -> None:
    done = _hubshard("--version")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, __version__, "")


@pytest.mark.parametrize(
    "verb",
    [
        [],
        ["publish"],
        ["pull"],
        ["inspect"],
        ["verify"],
        ["diff"],
        ["rollback"],
        ["demo"],
        ["hub"],
        ["hub", "serve"],
        ["hub", "gc"],
    ],
)
def test_every_verb_explains_itself(verb: list[str]) -> None:
    done = _hubshard(*verb, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["publish"], ["publish", "here", "org/name", "--staging", "somewhere"], ["nonsense"], ["pull", "--no"]],
)
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(arguments: list[str]) -> None:
    done = _hubshard(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_known_error_is_one_line_and_a_hint_without_a_traceback(tmp_path: Path) -> None:
    done = _hubshard("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("Error: ")
    assert "nothing" in error
    assert hint.startswith("Hint: ")


def test_a_number_in_the_environment_that_is_none_is_one_line() -> None:
    for value in ("x", ""):
        done = _hubshard("pull", "org/name", environment={"HF_HUB_DOWNLOAD_TIMEOUT": value})
        assert done.returncode == 1
        said = f"Error: HF_HUB_DOWNLOAD_TIMEOUT is {value!r} in the environment, not a whole number"
        assert done.stderr.splitlines()[0] == said


@pytest.mark.parametrize("endpoint", ["http://[bad", "hub.local", " http://host"])
def test_an_endpoint_that_is_no_url_is_one_line(endpoint: str, tmp_path: Path) -> None:
    done = _hubshard("pull", "org/name", "--local-dir", str(tmp_path / "here"), environment={"HF_ENDPOINT": endpoint})
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"Error: {endpoint!r} is no URL of a Hub"
    assert not (tmp_path / "here").exists()


def test_a_pickled_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    done = _hubshard("inspect", str(tmp_path))
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_optional_package_is_named_with_the_extra_that_brings_it() -> None:
    code = (
        "import sys\nclass Refuse:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'starlette': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Refuse())\nfrom hubshard.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, "hub", "serve", "--root", "unused"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["Error: this needs the package starlette", 'Hint: pip install "hubshard[hub]"']


def test_inspect_shows_files_dtypes_and_totals(model: Path) -> None:
    done = _hubshard("inspect", str(model))
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
    assert "3 tensors, 18 parameters, 52 B in 1 file" in done.stdout
    assert "head is a" in done.stdout
    assert "b[0].weight" not in done.stdout


def test_inspect_lists_tensors_with_names_that_hold_brackets(model: Path) -> None:
    done = _hubshard("inspect", str(model), "--tensors")
    row = next(line for line in done.stdout.splitlines() if "b[0].weight" in line)
    assert row.split() == ["b[0].weight", "BF16", "3x4", "24", "B", "model.safetensors"]
    assert "scalar" in done.stdout


def test_inspect_as_json_is_for_machines(model: Path) -> None:
    report = json.loads(_hubshard("inspect", str(model), "--json").stdout)
    assert report["files"] == {"model.safetensors": (model / "model.safetensors").stat().st_size}
    assert report["dtypes"] == {"BF16": 24, "F32": 20, "I64": 8}
    assert report["parameters"] == 18
    assert report["aliases"] == {"head": "a"}
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["a"] == {"name": "a", "dtype": "F32", "shape": [5], "nbytes": 20, "file": "model.safetensors"}


def test_ctrl_c_exits_with_130_and_one_line() -> None:
    code = (
        "import typer\nfrom hubshard.cli.common import interruptible\napp = typer.Typer()\n"
        "@app.command()\n@interruptible('all is well.')\ndef verb() -> None:\n    raise KeyboardInterrupt\napp()"
    )
    done = _hubshard(code=code)
    assert done.returncode == 130
    assert done.stderr.split("\n", 1)[1] == "Interrupted: all is well.\n"
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one process there")
def test_ctrl_c_while_modules_are_loaded_is_one_line_and_is_ignored_where_whoever_started_us_says_so() -> None:
    # the import of the app is where most of the time goes that comes before a verb
    loading = "import os, signal, sys\nclass Press:\n    def find_spec(self, name, path=None, target=None):\n"
    loading += "        if name == 'hubshard.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
    loading += "sys.meta_path.insert(0, Press())\n"
    run = "from hubshard.cli import main\nmain()"
    done = _hubshard("--version", code=loading + run)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nInterrupted\n")
    in_background = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = _hubshard("--version", code=loading + in_background + run)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, __version__, "")


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one process there")
def test_ctrl_c_when_all_is_done_is_one_line_and_at_the_very_end_changes_nothing() -> None:
    press = "import os, signal, sys\nclass Press:\n    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 2)\n"
    last = f"{press}press = Press()\nfrom hubshard.cli import main\nmain()"
    done = _hubshard("--version", code=last)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, __version__, "")
    after = "import os\nfrom hubshard.cli import main\ntry: main()\nfinally: os.kill(os.getpid(), 2)"
    done = _hubshard("--version", code=after)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (130, __version__, "\nInterrupted\n")


def test_gc_of_a_directory_that_holds_no_hub_is_an_error_and_makes_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("nothing", "folder"):
        done = _hubshard("hub", "gc", "--root", str(tmp_path / name))
        assert done.returncode == 1
        assert f"{name} holds no Hub" in done.stderr
    assert not (tmp_path / "nothing").exists()
    assert not list((tmp_path / "folder").iterdir())
