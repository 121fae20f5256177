"""A fork while another thread talks to the Hub: the child must not wait for that thread, which it does not have.

huggingface_hub closes its session in every child that is forked. That waits for the lock of the connections, and where
a thread of the parent holds it just then, as one that pushes a step does, the child hangs for ever: a worker of a data
loader, and with it the training. So a session that nobody uses stands in for it while a process is forked. Where a
thread is just making the session, the fork waits for it: it holds locks of OpenSSL too, which the child cannot renew.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

__all__ = ["fork_without_session"]

_HTTP = "huggingface_hub.utils._http"
_CLIENT, _FACTORY, _LOCK = "_GLOBAL_CLIENT", "_GLOBAL_CLIENT_FACTORY", "_CLIENT_LOCK"

_MAKING_SECONDS = 10.0


class _Session:
    # the session of this process, while it forks; and what stands in for it: kept, since making one takes a while
    def __init__(self) -> None:
        self._set_aside: Any = None
        self._stand_in: Any = None
        self._lock: Any = None

    def set_aside(self) -> None:
        http = sys.modules.get(_HTTP)
        lock = getattr(http, _LOCK, None)
        if lock is not None and lock.acquire(timeout=_MAKING_SECONDS):
            self._lock = lock
        session = getattr(http, _CLIENT, None)
        if session is None or session is self._stand_in:  # another thread forks too
            return
        if self._stand_in is None:
            self._stand_in = getattr(http, _FACTORY)()
        self._set_aside = session
        setattr(http, _CLIENT, self._stand_in)  # and never None: a thread may be about to take it

    def put_back(self) -> None:
        http = sys.modules.get(_HTTP)
        if self._set_aside is not None and getattr(http, _CLIENT, None) is self._stand_in:
            setattr(http, _CLIENT, self._set_aside)
        self._set_aside = None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def forget(self) -> None:
        self._set_aside = self._stand_in = self._lock = None  # the child has closed it
        http = sys.modules.get(_HTTP)
        if hasattr(http, _LOCK):
            setattr(http, _LOCK, threading.Lock())


def fork_without_session() -> None:
    """Set the session aside at every fork from now on."""
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        session = _Session()
        os.register_at_fork(before=session.set_aside, after_in_parent=session.put_back, after_in_child=session.forget)
