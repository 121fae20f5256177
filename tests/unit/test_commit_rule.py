"""The commit rule against a branch in memory whose answers get lost, come late or are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hubshard.errors import ConflictError, StoreError
from hubshard.store.commit import Made, commit_by_rule, publish_id_in, with_publish_id
from hubshard.store.patience import BusyError, Patience

OURS = "ours-1"


@dataclass
class Branch:
    """A branch that takes a commit only on its head; `plan` says what happens to each attempt."""

    plan: list[str] = field(default_factory=list)
    commits: list[Made] = field(default_factory=lambda: [Made("root", None, "ann", "initial commit")])
    attempts: int = 0
    looks: int = 0
    waits: list[float] = field(default_factory=list)

    def push(self, commit: str, publish_id: str | None, author: str = "bob", title: str = "theirs") -> None:
        self.commits.insert(0, Made(commit, publish_id, author, title))

    def send(self) -> str:
        step = self.plan[self.attempts] if self.attempts < len(self.plan) else "fine"
        self.attempts += 1
        if step == "refused":
            raise StoreError("403: no write access")
        if step == "down":
            raise StoreError("503", retryable=True)
        if step == "busy":
            raise BusyError("429", wait_seconds=17.0)
        if step == "rival":
            self.push("theirs", "theirs-1")
        if step == "strange":
            raise ConflictError("412, though the head is the parent")
        if self.commits[0].commit != "root":
            raise ConflictError("412")
        self.push("made", OURS, "us", "ours")
        if step == "lost":
            raise StoreError("the connection was closed", retryable=True)
        if step == "lost and followed":
            self.push("after", None)
            raise StoreError("the connection was closed", retryable=True)
        return "made"

    def history(self) -> list[Made]:
        self.looks += 1
        return list(self.commits)

    def run(self, history: Callable[[], list[Made]] | None = None) -> str:
        return commit_by_rule(
            self.send,
            history or self.history,
            branch="main",
            parent="root",
            publish_id=OURS,
            patience=Patience(sleep=self.waits.append),
        )


def test_a_commit_that_is_answered_is_not_looked_at() -> None:
    branch = Branch()
    assert branch.run() == "made"
    assert (branch.attempts, branch.looks, branch.waits) == (1, 0, [])


@pytest.mark.parametrize("lost", ["lost", "lost and followed"])
def test_a_lost_answer_is_told_by_the_publish_id_and_sent_once(lost: str) -> None:
    branch = Branch([lost])
    assert branch.run() == "made"
    assert branch.attempts == 1


def test_a_branch_that_stayed_is_tried_again() -> None:
    branch = Branch(["down", "busy", "strange", "fine"])
    assert branch.run() == "made"
    assert branch.waits == [1.0, 17.0, 4.0]


def test_a_refusal_is_final() -> None:
    branch = Branch(["refused"])
    with pytest.raises(StoreError, match="no write access") as caught:
        branch.run()
    assert (branch.attempts, branch.looks, caught.value.retryable) == (1, 0, False)


def test_a_branch_that_moved_is_a_conflict_that_says_who_moved_it() -> None:
    branch = Branch(["down", "rival"])
    with pytest.raises(ConflictError, match="moved on from root: theirs by bob: 'theirs'"):
        branch.run()
    assert branch.attempts == 2


def test_a_conflict_names_the_newest_of_many() -> None:
    branch = Branch()
    for number in range(5):
        branch.push(f"c{number}", None, title=f"step {number}")
    with pytest.raises(ConflictError, match=r"c4 by bob: 'step 4'; c3 .*; c2 by bob: 'step 2' and 2 more"):
        branch.run()


def test_a_history_that_was_squashed_is_a_conflict() -> None:
    branch = Branch(commits=[Made("squashed", None, "carol", "all in one")])
    with pytest.raises(ConflictError, match="squashed by carol"):
        branch.run()


def test_a_branch_that_is_gone_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match="is gone"):
        Branch(commits=[Made("x", None, "", "")]).run(history=list)


def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    branch = Branch(["down"] * 99)
    with pytest.raises(StoreError, match="gave up after 6 attempts to commit to 'main': 503") as caught:
        branch.run()
    assert (branch.attempts, len(branch.waits), caught.value.retryable) == (6, 5, True)


def test_a_look_that_fails_counts_as_a_failure_of_its_attempt() -> None:
    branch = Branch(["lost"])

    def history() -> list[Made]:
        branch.looks += 1
        if branch.looks == 1:
            raise StoreError("down as well", retryable=True)
        return list(branch.commits)

    assert branch.run(history) == "made"
    assert [made.commit for made in branch.commits] == ["made", "root"]


def test_a_look_that_is_refused_is_final() -> None:
    def history() -> list[Made]:
        raise StoreError("401: the token has expired")

    with pytest.raises(StoreError, match="token has expired"):
        Branch(["lost"]).run(history)


def test_a_branch_that_must_be_new_is_a_conflict_when_it_is_there() -> None:
    with pytest.raises(ConflictError, match="exists already, at root"):
        commit_by_rule(_stale, Branch().history, branch="main", parent=None, publish_id=OURS)


def _stale() -> str:
    raise ConflictError("409")


STEPS = ["fine", "lost", "lost and followed", "down", "busy", "rival", "strange", "refused"]


@given(st.lists(st.sampled_from(STEPS), max_size=8))
def test_whatever_happens_there_is_one_commit_of_ours_or_an_error_and_none(plan: list[str]) -> None:
    branch = Branch(plan)
    try:
        result = branch.run()
    except (ConflictError, StoreError):
        result = None
    ours = [made.commit for made in branch.commits if made.publish_id == OURS]
    assert ours == ([] if result is None else [result])


@pytest.mark.parametrize("description", ["", "Body", "Body\n\nHubshard-Publish-Id: older", "Signed-off-by: a <b>\n"])
def test_a_publish_id_is_the_last_trailer_of_a_message(description: str) -> None:
    message = with_publish_id(description, "0123-ab")
    assert message.splitlines()[-1] == "Hubshard-Publish-Id: 0123-ab"
    assert message.startswith(description.strip())
    assert publish_id_in(message) == "0123-ab"


@pytest.mark.parametrize("message", ["", "Title", "it says Hubshard-Publish-Id: x", "Hubshard-Publish-Id: "])
def test_a_message_without_the_trailer_has_no_publish_id(message: str) -> None:
    assert publish_id_in(message) is None


@pytest.mark.parametrize("publish_id", ["", "a b", "a\nHubshard-Publish-Id: b"])
def test_a_publish_id_is_one_word(publish_id: str) -> None:
    with pytest.raises(ValueError, match="no publish id"):
        with_publish_id("", publish_id)
