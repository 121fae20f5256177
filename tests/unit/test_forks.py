"""A process that is forked while a thread talks to the Hub does not wait for that thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

CODE = """
import os, threading
from huggingface_hub.utils import get_session
import hubshard.store.hub_client

client = get_session()
held, done = threading.Event(), threading.Event()

class Slow:  # as a client whose lock a thread holds
    def __init__(self):
        self.lock = threading.Lock()

    def close(self):
        with self.lock:
            pass

import huggingface_hub.utils._http as http
http._GLOBAL_CLIENT = slow = Slow()

def talk():
    with slow.lock:
        held.set()
        done.wait(60)

thread = threading.Thread(target=talk)
thread.start()
held.wait(60)
child = os.fork()
if not child:
    os._exit(0 if http._GLOBAL_CLIENT is None else 1)
assert http._GLOBAL_CLIENT is slow
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done.set()
"""


def test_a_fork_while_a_thread_talks_to_the_hub_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
