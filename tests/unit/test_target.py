"""What a target is taken for, with the client's own check of repo ids as the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from hypothesis import given, settings
from hypothesis import strategies as st

from hubshard.errors import FormatError
from hubshard.target import RepoTarget, check_commit, check_endpoint, check_repo_id, parse_target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("org/name", RepoTarget("org/name")),
        ("org/name@v1", RepoTarget("org/name", "v1")),
        ("org/name@refs/pr/3", RepoTarget("org/name", "refs/pr/3")),
        ("hf://org/name", RepoTarget("org/name")),
        ("hf://org/name@main", RepoTarget("org/name", "main")),
        ("hf://name", RepoTarget("name")),
    ],
)
def test_repos_are_told_from_paths(
    text: str, target: RepoTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["./out", "../out", "/out/x", "C:/out", "C:\\out", "out\\x", ".", "\\\\server\\x"])
def test_what_can_only_be_a_path_is_one_even_where_nothing_is_there(text: str) -> None:
    assert parse_target(text) == Path(text)


def test_an_existing_path_wins_over_a_repo_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_target("org/name") == Path("org/name")
    assert parse_target("org") == Path("org")
    assert parse_target("hf://org/name") == RepoTarget("org/name")


def test_a_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert parse_target("~/model") == tmp_path / "model"


def test_a_path_is_taken_as_it_is() -> None:
    assert parse_target(Path("no/such")) == Path("no/such")


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "name", "org/name@", "org/name@a b", "org/name@\n", "org/na me", "a/b/c", "hf://", "hf://a/b/c"),
        *("org/name.git", "org/..", "org/a--b", "-org/name", "org/name-", "http://x/y", "org/name\0", "x" * 6000),
        *("org/" + "x" * 97, "o" * 97 + "/x", "~nobody-of-this-name-here/x", "org/n\u00e4me"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_target(text)
    assert "\n" not in caught.value.message


@given(st.text("aZ0_.-/", min_size=1, max_size=12) | st.text(max_size=8) | st.just("a" * 96) | st.just("a" * 97))
@settings(max_examples=300, deadline=None)
def test_repo_ids_are_those_that_the_client_takes(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        with pytest.raises(FormatError):
            check_repo_id(repo_id)
    else:
        assert check_repo_id(repo_id) == repo_id


@pytest.mark.parametrize("url", ["https://hub.example", "http://127.0.0.1:8000/", "http://user:word@host/hub"])
def test_the_url_of_a_hub_may_have_a_port_a_user_and_a_path(url: str) -> None:
    assert check_endpoint(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    ["", " http://host", "http://host\n", "http://host?x=1", "http://host#x", "ftp://host", "http://:1", "http://a:x"],
)
def test_what_is_no_url_of_a_hub_is_refused(url: str) -> None:
    with pytest.raises(FormatError, match="is no URL of a Hub"):
        check_endpoint(url)


@pytest.mark.parametrize("commit", ["0123abc", "0" * 40])
def test_a_commit_is_named_in_full_or_by_its_first_digits(commit: str) -> None:
    assert check_commit(commit) == commit
    for wrong in ("", "012345", f"{commit}z", commit.upper() + "A" * 40, f" {commit}"):
        with pytest.raises(FormatError, match="is no commit"):
            check_commit(wrong)
