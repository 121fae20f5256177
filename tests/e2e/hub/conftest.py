"""The unmodified huggingface_hub in this process, on a Hub in another one; each test has repos of its own."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, RepoFile, constants

if TYPE_CHECKING:
    from tests.conftest import Hub

_NUMBERS = itertools.count()


class Client:
    """One user's client. What it downloads goes to a cache of its own."""

    def __init__(self, hub: Hub, folder: Path, token: str | None = None) -> None:
        self.hub = hub
        self.folder = folder
        self.token = token or "hf_test"
        self.api = HfApi(endpoint=hub.url, token=self.token)
        self.cache = folder / f"cache-{self.token}"

    def repo(self, name: str = "repo", **options: Any) -> str:
        """A new repo."""
        return self.api.create_repo(f"{name}-{next(_NUMBERS)}", **options).repo_id

    def commit(self, repo: str, files: dict[str, bytes | str], message: str = "a commit", **options: Any) -> CommitInfo:
        """Commit files."""
        added = [
            CommitOperationAdd(path, data.encode() if isinstance(data, str) else data) for path, data in files.items()
        ]
        made: CommitInfo = self.api.create_commit(repo, added, commit_message=message, **options)
        return made

    def large(self, repo: str, *paths: str) -> set[str]:
        """Those of the paths that are LFS files."""
        found = self.api.get_paths_info(repo, list(paths))
        return {item.path for item in found if isinstance(item, RepoFile) and item.lfs}

    def files(self, repo: str, **options: Any) -> set[str]:
        """Names of all files but the one that every repo starts with."""
        return set(self.api.list_repo_files(repo, **options)) - {".gitattributes"}

    def titles(self, repo: str, **options: Any) -> list[str]:
        """Titles of the commits, the newest first."""
        return [commit.title for commit in self.api.list_repo_commits(repo, **options)]

    def head(self, repo: str, revision: str = "main") -> str:
        """The commit that a revision names."""
        found = self.api.repo_info(repo, revision=revision).sha
        assert found is not None
        return found

    def read(self, repo: str, path: str, **options: Any) -> bytes:
        """Download a file; its content."""
        return Path(self.api.hf_hub_download(repo, path, cache_dir=self.cache, **options)).read_bytes()


@pytest.fixture(autouse=True)
def _own_xet_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet-cache"))


@pytest.fixture
def client(module_hub: Hub, tmp_path: Path) -> Client:
    """A client of the module's Hub that may do everything."""
    return Client(module_hub, tmp_path)


# The client's plain uploads use a way of httpx that is going away.
_OLD_CALL = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(params=["xet", pytest.param("lfs", marks=_OLD_CALL)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How large files travel: the client's own switch, which it reads at every call."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", request.param == "lfs")
    return str(request.param)


@pytest.fixture
def noise() -> bytes:
    """A megabyte that does not compress, and that no other test has."""
    return random.Random(next(_NUMBERS)).randbytes(1 << 20)
