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

MAKING = """
import os, signal, threading
from huggingface_hub.utils import get_session
import huggingface_hub.utils._http as http
import hubshard.store.hub_client

make, begun, made = http.default_client_factory, threading.Event(), []

def slow():
    begun.set()
    threading.Event().wait(0.3)
    made.append(make())
    return made[0]

http._GLOBAL_CLIENT_FACTORY = slow
thread = threading.Thread(target=get_session)
thread.start()
begun.wait(60)
child = os.fork()
if not child:
    signal.alarm(20)
    http._GLOBAL_CLIENT_FACTORY = make
    get_session()
    os._exit(0 if made else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
assert get_session() is made[0]
"""


@pytest.mark.parametrize("code", [CODE, MAKING])
def test_a_fork_while_a_thread_talks_to_the_hub_does_not_wait_for_it(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
