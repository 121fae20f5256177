"""Any sequence of commits over a line that fails in between leaves what the same sequence leaves in a dictionary."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from hubshard.store.hub import HubStore
from tests.conftest import Hub
from tests.contract.test_store_model import SETTINGS, Model
from tests.faults.models import new_repo
from tests.faults.proxy import Fault, Proxy, cut, done_then, drop, lose, say

pytest.importorskip("starlette")

FAULTS: dict[str, Fault] = {
    "dropped": drop,
    "lost": lose,
    "503": say(503),
    "done, but 504": done_then(say(504)),
    "429": say(429, Retry_After="0"),
    "cut": cut(5),
}
LINES = st.sampled_from([r".*/commit/", r".*/preupload/", r".*/resolve/", r".*/(lfs|xet)", r"GET /api/"])


def test_a_repo_behind_a_bad_line_behaves_as_a_dictionary(module_hub: Hub, proxy: Proxy) -> None:
    class Remote(Model):
        branch = "work"
        ignored: ClassVar[set[str]] = {".gitattributes"}
        repos = 0

        def __init__(self) -> None:
            super().__init__()
            self.broken = 0
            proxy.heal()
            Remote.repos += 1
            repo_id = new_repo(module_hub).repo_id
            self.store = HubStore(repo_id, endpoint=proxy.url, token="hf_test", xet=Remote.repos % 2 == 0)

        @precondition(lambda self: self.broken < 4)
        @rule(line=LINES, fault=st.sampled_from(sorted(FAULTS)))
        def break_the_line(self, line: str, fault: str) -> None:
            self.broken += 1
            proxy.fail(line, FAULTS[fault])

    run_state_machine_as_test(Remote, settings=settings(SETTINGS, max_examples=6, stateful_step_count=8))
    assert proxy.seen
