"""The command line: `hubshard`, also installed as `hf-shard` so that `hf shard` finds it.

Data goes to stdout, messages and progress to stderr. Exit status: 0 done, 1 a known error, 2 wrong usage, 3 a limit
of the caller's (`--max-retries`, `--stall-seconds`, `--min-rate`) was broken, 130 Ctrl-C.
Verbs import what they run inside their functions, so that help and errors of usage come at once.
"""

from __future__ import annotations

from hubshard.cli.app import main

__all__ = ["main"]
