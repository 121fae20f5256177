"""What errors say, and to whom."""

from __future__ import annotations

import pickle
import sys
import traceback

import pytest

from hubshard.errors import FormatError, NotFoundError, StoreError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has notes since 3.11")
def test_a_traceback_shows_the_hints() -> None:
    error = NotFoundError("no such step", hint="list them")
    error.add_hint("a repo was made")
    shown = "".join(traceback.format_exception(error))
    assert "NotFoundError: no such step\nHint: list them\nHint: a repo was made" in shown
    assert (str(error), error.hint) == ("no such step", "list them; a repo was made")


def test_errors_travel_between_processes_with_all_that_they_say() -> None:
    error = StoreError("later", hint="try again", retryable=True)
    error.add_place("org/name@v1", known_by="org/name")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.hint, again.retryable) == ("org/name@v1: later", "try again", True)


def test_a_place_is_named_once() -> None:
    error = FormatError("org/name: no weights")
    error.add_place("org/name@v1", known_by="org/name")
    assert str(error) == "org/name: no weights"
