"""The command line: `hubshard`, also installed as `hf-shard` so that `hf shard` finds it.

Data goes to stdout, messages and progress to stderr. Exit status: 0 done, 1 a known error, 2 wrong usage, 3 a limit
of the caller's (`--max-retries`, `--stall-seconds`, `--min-rate`) was broken, 130 Ctrl-C.
Verbs import what they run inside their functions, so that help and errors of usage come at once.
"""

from __future__ import annotations

import atexit
import os
import signal
from contextlib import suppress
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command line; never returns."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for what a script has started in the background
        signal.signal(signal.SIGINT, _leave)
    # when all is said and done, Python gives the signal back to the system, which would end the process with a status
    # that says that nothing was done
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from hubshard.cli.app import main as run

    run()


def _leave(*_: object) -> NoReturn:
    # Ctrl-C before a verb has begun: modules are being loaded, and nothing has to be undone
    with suppress(OSError):
        os.write(2, b"\nInterrupted\n")
    os._exit(130)
