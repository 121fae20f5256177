"""What is still under way when the interpreter ends, of branches that nobody closed: it is waited for, not dropped.

`atexit` comes after Python has joined its threads and before it stops those that are daemons, as ours are; so they go
on meanwhile. They must not need a thread that is not there yet: none can be begun by then.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from hubshard.resume.saves.settling import INTERRUPTED_SECONDS, give_up, settle

if TYPE_CHECKING:
    from hubshard.resume.saves.saver import Saver

__all__ = ["forget", "watch"]

_LOG = logging.getLogger("hubshard")
_FAILED = 1

_open: weakref.WeakSet[Saver] = weakref.WeakSet()
_failures: list[Exception] = []
_pid = os.getpid()


def watch(saver: Saver) -> None:
    """Wait for it when the interpreter ends, before what was registered until now is called."""
    global _pid  # noqa: PLW0603  # a process that was forked may have branches of its own
    if _pid != os.getpid():
        _pid = os.getpid()
        _open.clear()
    _open.add(saver)
    atexit.unregister(_finish)
    atexit.register(_finish)


def forget(saver: Saver) -> None:
    """It was closed."""
    _open.discard(saver)


def _finish() -> None:
    if _pid != os.getpid():
        return
    for saver in list(_open):
        if saver.is_idle:
            continue
        _LOG.warning("the program ends, and a ResumeBranch was not closed: use it in a `with` block, or call close()")
        try:
            _settle(saver)
            saver.raise_error()
        except KeyboardInterrupt:
            give_up(saver)
        except Exception as error:  # noqa: BLE001  # the others are waited for too
            _LOG.error("%s", error)  # the traceback is of no use here
            _failures.append(error)
        finally:
            saver.close(lambda: None)


def _settle(saver: Saver) -> None:
    by_ctrl_c = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)  # what ended the program
    end = time.monotonic() + INTERRUPTED_SECONDS if by_ctrl_c else math.inf
    if not settle(saver, lambda: end - time.monotonic(), says_at_once=by_ctrl_c):
        give_up(saver)


def _tell_status(*_: Any) -> None:
    """Let the process end with an error where a save failed when nobody could be told any more.

    Nothing but `os._exit` sets the status by now. What was registered before this module was imported is skipped.
    """
    if _failures and _pid == os.getpid():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_FAILED)


atexit.register(_tell_status)  # on import, so that what others register from now on is called before it
