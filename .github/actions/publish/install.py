"""Install hubshard into a virtual environment of its own. Needs Python alone; says where the environment's is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from runner import ActionError, fail, set_outputs

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]*", re.ASCII)
_OLDEST = (3, 10)


def main() -> None:
    """Run the step."""
    if sys.version_info < _OLDEST:
        raise ActionError(f"Python 3.10 or newer is needed, and this is {sys.version.split()[0]}: set python-version")
    # torch is large: only a change of dtype computes anything
    extra = "[torch]" if os.environ.get("INPUT_DTYPE", "").strip() else ""
    requirement = _requirement(os.environ.get("INPUT_HUBSHARD_VERSION", "").strip(), extra)
    target = Path(tempfile.mkdtemp(prefix="hubshard-", dir=os.environ.get("RUNNER_TEMP") or None)) / "venv"
    venv.create(target, with_pip=True, symlinks=os.name != "nt")
    python = target / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    _pip_install(python, requirement)
    subprocess.run([str(python), "-I", "-m", "hubshard", "--version"], check=True)
    set_outputs({"python": str(python)})


def _requirement(wanted: str, extra: str) -> str:
    """What pip is to install: the code that this action came with, or a release."""
    if not wanted:
        return f"{Path(__file__).resolve().parents[3]}{extra}"
    if not _VERSION.fullmatch(wanted):
        raise ActionError(f"input hubshard-version: {wanted!r} is not a version such as 0.1.0")
    return f"hubshard{extra}=={wanted}"


def _pip_install(python: Path, requirement: str) -> None:
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
    if subprocess.run(command, check=False).returncode != 0:
        raise ActionError(f"pip could not install {requirement}; its own words are in the log")


if __name__ == "__main__":
    try:
        main()
    except ActionError as error:
        fail(error)
