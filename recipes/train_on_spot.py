"""Runs a training on a machine that may be taken away at short notice, and starts it again where it crashed.

    pip install ".[torch]"
    python recipes/train_on_spot.py --notice-file /run/preempted -- python recipes/train_loop.py --repo my-org/my-run
    python recipes/train_on_spot.py --notice-url http://169.254.169.254/latest/meta-data/spot/instance-action -- ...

The notice is a file that appears, or a URL that answers at all once the machine is to go (404 before). It is passed on
to the training as SIGTERM, like SIGTERM itself; the training saves at the end of its step, and what it ends with is
what this ends with, so that the scheduler starts it on another machine. Any other failure is a crash: the training is
started again here and goes on from its last step.
"""

from __future__ import annotations

import argparse
import http.client
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 1.0


def is_noticed(file: str | None, url: str | None) -> bool:
    """Whether the machine is about to go."""
    if file is not None and Path(file).exists():
        return True
    if url is None:
        return False
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310  # the operator's own URL
            return True
    except (OSError, http.client.HTTPException):  # 404, or nobody answers just now
        return False


def run(command: Sequence[str], *, notice_file: str | None, notice_url: str | None, crashes: int) -> int:
    """Run the training to its end, over so many crashes at most; what it ended with."""
    is_told = False

    def told_by_signal(*_: object) -> None:
        nonlocal is_told
        is_told = True

    signal.signal(signal.SIGTERM, told_by_signal)
    signal.signal(signal.SIGINT, told_by_signal)
    while True:
        training = subprocess.Popen(command, start_new_session=True)  # a Ctrl-C reaches it through us alone
        is_passed_on = False
        while training.poll() is None:
            is_told = is_told or is_noticed(notice_file, notice_url)
            if is_told and not is_passed_on:
                training.terminate()
                is_passed_on = True
            time.sleep(POLL_SECONDS)
        code = training.returncode if training.returncode >= 0 else 128 - training.returncode
        if code == 0 or is_told or crashes == 0:
            return code
        crashes -= 1
        print(f"the training ended with {code}; it is started again, restarts left: {crashes}", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--notice-file", metavar="PATH")
    parser.add_argument("--notice-url", metavar="URL")
    parser.add_argument("--crashes", type=int, default=5, help="how often to start it again")
    parser.add_argument("command", nargs="+", help="the training, behind --")
    told = parser.parse_args()
    sys.exit(run(told.command, notice_file=told.notice_file, notice_url=told.notice_url, crashes=told.crashes))
