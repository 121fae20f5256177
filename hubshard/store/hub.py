"""A repo on the Hub as a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hubshard.errors import ConflictError, NotFoundError
from hubshard.paths import check_store_path
from hubshard.protocols import Buffer, Content, Entry, Revision, Staged
from hubshard.store.commit import Made, commit_by_rule
from hubshard.store.hub_card import check_card
from hubshard.store.hub_client import PATHS_PER_REQUEST, HubClient, Token
from hubshard.store.hub_commit import check_changes, commit_body, history_of, made_of, send_commit
from hubshard.store.hub_errors import is_revision_missing, translated, understood
from hubshard.store.hub_pulls import open_pull_request_of, pull_request_of
from hubshard.store.hub_read import RangeReader
from hubshard.store.hub_stage import Advice, Stager
from hubshard.store.hub_xet import Callbacks
from hubshard.store.hub_xet_read import XetReader, file_of
from hubshard.store.hub_xet_session import XetSessions, is_xet_enabled
from hubshard.store.patience import Patience

__all__ = ["HubStore"]

_MAIN = "main"
_OnBytes = Callable[[int], None]


class HubStore:
    """A repo on the Hub as a `Store`; a branch may also be given as a tag, a commit or `refs/pr/N` where it is read.

    Safe to use from several threads at once. Errors carry the server's own words; those that are not worth another try
    are raised at once.

    Args:
        repo_id: "org/name", or "name" for the token's own user.
        repo_type: "model", "dataset" or "space".
        token: a token; None for the one of this machine (login, HF_TOKEN, or the CI's identity), False for none, or a
            function that is asked before each request.
        endpoint: the Hub's URL; None for that of huggingface_hub (HF_ENDPOINT).
        xet: whether large files may go by Xet; None for as hf_xet is installed and HF_HUB_DISABLE_XET says.
        patience: with a bad line; None for the usual.

    Raises:
        FormatError: no valid repo id.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        repo_type: str = "model",
        token: Token = None,
        endpoint: str | None = None,
        xet: bool | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._client = HubClient(repo_id, repo_type=repo_type, token=token, endpoint=endpoint, patience=patience)
        stall_seconds = self._client.patience.stall_seconds
        sessions = XetSessions(stall_seconds) if (is_xet_enabled() if xet is None else xet) else None
        self._stager = Stager(self._client, sessions)
        self._xet_reader = None if sessions is None else XetReader(self._client, sessions)
        self._reader = RangeReader(self._client, self._xet_reader)

    def __repr__(self) -> str:
        return f"HubStore({self._client.repo!r}, endpoint={self._client.endpoint!r})"

    @property
    def repo_id(self) -> str:
        """The whole id, "org/name"; a bare name stays one until `create_repo` was told its namespace."""
        return self._client.repo_id

    # The store itself

    def head(self, branch: str) -> Revision | None:
        """The newest commit of a branch, tag, commit or pull request; None where there is none.

        Raises:
            NotFoundError: the repo does not exist, or the token may not see it.
        """
        try:
            url, what = self._client.api_url("revision", branch), f"look at {branch!r}"
            sha = self._client.ask("GET", url, what, lambda answer: str(answer["sha"]), params={"expand": "sha"})
        except NotFoundError as error:
            if is_revision_missing(error):
                return None
            raise
        return Revision(branch, sha)

    def list(self, at: Revision) -> Sequence[Entry]:
        """All files of a revision, sorted by path; `sha256` is known of large files, `blob_id` is git's."""
        url, what = self._client.api_url("tree", at.commit), f"list the files at {at.commit[:12]}"
        found = [file for file in self._client.pages(url, what, file_of, recursive=True) if file is not None]
        if self._xet_reader is not None:
            self._xet_reader.note(at.commit, {entry.path: xet for entry, xet in found if xet is not None})
        return sorted((entry for entry, _ in found), key=lambda entry: entry.path)

    def read(
        self, at: Revision, path: str, start: int, stop: int, into: memoryview, *, on_read: _OnBytes = lambda _: None
    ) -> None:
        """Fill `into` with bytes `start` to `stop` of a file; an interrupted transfer goes on where it stopped.

        Ranges of 4 MiB and more of a revision that was listed come by Xet where that is on, all others by HTTP, and
        straight into `into`. `on_read` is told of bytes that have come since its last call.

        Raises:
            IntegrityError: the Hub delivered another range.
            StoreError: refused, or failed in vain.
        """
        self._reader.read(at.commit, path, start, into[: stop - start], on_read)

    def stream(self, at: Revision, path: str, start: int, stop: int) -> Iterator[Buffer]:
        """Bytes `start` to `stop` of a file in order, in pieces as they arrive, each valid until the next is asked for.

        Raises:
            IntegrityError, StoreError: as for `read`.
        """
        return self._reader.stream(at.commit, path, start, stop)

    def stage(
        self,
        branch: str,
        path: str,
        data: Content,
        *,
        nbytes: int,
        sha256: str | None = None,
        create_pr: bool = False,
        on_sent: _OnBytes = lambda _: None,
        on_ending: Callable[[], None] = lambda: None,
    ) -> Staged:
        """Make content durable without showing it. A branch that is not there yet is taken as main.

        Small text goes along in the receipt. Large files go by Xet in one pass over `data`; where Xet is off or the Hub
        has none, by LFS in two (one with `sha256`). Where the repo holds `sha256`, `data` is hardly read.

        Args:
            branch: the branch whose commit will name it.
            path: where it will be.
            data: its content.
            nbytes: its size.
            sha256: of the content, where known.
            create_pr: the commit will open a pull request.
            on_sent: is told of bytes that went to the storage since its last call, from any thread.
            on_ending: called when most of it is there and the rest on its way, from any thread; perhaps never.

        Raises:
            IntegrityError: `data` has another size or hash than said.
            StoreError: the repo's .gitignore refuses it, the token may not write, or tried again in vain.
        """
        callbacks = Callbacks(on_sent, on_ending)
        return self._stager.stage(branch, check_store_path(path), data, nbytes, sha256, callbacks, create_pr=create_pr)

    def commit(
        self,
        branch: str,
        *,
        parent: Revision | None,
        add: Sequence[Staged],
        remove: Sequence[str],
        message: str,
        publish_id: str,
        create_pr: bool = False,
    ) -> Revision:
        """One commit, all or nothing, told from a lost answer by `publish_id`, which its message carries.

        With `parent` None the branch is made at the first commit of main, which holds at most `.gitattributes`.

        Args:
            branch: what moves; with `create_pr`, what the pull request is against.
            parent: the head that it builds on.
            add: staged files.
            remove: files to delete.
            message: first line is the title.
            publish_id: unique per commit, one word.
            create_pr: open a pull request with the commit instead of moving the branch.

        Returns:
            The new revision; with `create_pr` its branch is "refs/pr/N".

        Raises:
            ConflictError: the head is not `parent`: who moved it, and how.
            StoreError: the token may not write, or tried again in vain.
        """
        check_changes(add, remove)
        base = parent or self._new_branch(branch)
        gone = self._present(base, set(remove) - {staged.path for staged in add})
        lines = commit_body(parent=base.commit, add=add, remove=gone, message=message, publish_id=publish_id)
        body = b"".join(lines)
        number: list[int] = []

        def send() -> str:
            commit, pull_request = send_commit(self._client, branch, body, create_pr=create_pr)
            number.extend([] if pull_request is None else [pull_request])
            return commit

        def history() -> Sequence[Made]:
            opened = pull_request_of(self._client, publish_id) if create_pr else None
            if opened is None:
                return history_of(self._client, branch, until=base.commit)
            number.append(opened[0])
            return [opened[1]]

        commit = commit_by_rule(
            send,
            history,
            branch=branch,
            parent=base.commit,
            publish_id=publish_id,
            patience=self._client.patience,
        )
        return Revision(f"refs/pr/{number[-1]}" if create_pr else branch, commit)

    # The repo

    def create_repo(self, *, private: bool | None = None, exist_ok: bool = True) -> str:
        """Make the repo; its whole id.

        Args:
            private: None for the namespace's default.
            exist_ok: a repo that is there is left as it is.

        Raises:
            ConflictError: it exists, and that is not ok.
            StoreError: the token may not create it.
        """
        client, what = self._client, "create the repo"

        def attempt() -> str:
            with understood(what, client.repo), translated(what, client.repo, needs="write"):
                url = client.api().create_repo(
                    client.repo_id, private=private, repo_type=client.repo_type, exist_ok=exist_ok
                )
            return url.repo_id

        # where it must be new, one whose answer was lost would be taken for that of somebody else
        client.repo_id = client.patience.insist(attempt, what, most=None if exist_ok else 0)
        return client.repo_id

    def repo_exists(self) -> bool:
        """Whether the repo exists and the token may see it."""
        return self._info("sha") is not None

    def is_private(self) -> bool:
        """Whether the repo is hidden from others.

        Raises:
            NotFoundError: no such repo.
        """
        info = self._info("private")
        if info is None:
            raise NotFoundError(f"{self._client.repo} does not exist, or it is private and the token may not see it")
        return bool(info["private"])

    def branches(self) -> Mapping[str, str]:
        """Branch to commit."""
        return self._refs("branches")

    def tags(self) -> Mapping[str, str]:
        """Tag to commit."""
        return self._refs("tags")

    def create_branch(self, name: str, at: Revision) -> Revision:
        """Make a branch at a revision; one that is there already is fine.

        Raises:
            ConflictError: it exists elsewhere.
        """
        url = self._client.api_url("branch", name)
        try:
            self._client.send(
                "POST", url, f"create the branch {name!r}", needs="write", json={"startingPoint": at.commit}
            )
        except ConflictError:
            head = self.head(name)
            if head is None or head.commit != at.commit:
                raise
        return Revision(name, at.commit)

    def delete_branch(self, name: str) -> None:
        """Remove a branch; one that is not there is fine."""
        self._delete("branch", name, f"delete the branch {name!r}")

    def tag(
        self, name: str, at: Revision, message: str = "", *, exist_ok: bool = False, move: bool = False
    ) -> Revision:
        """Tag a revision; a tag that is there already is fine.

        Args:
            name: of the tag.
            at: what it names.
            message: of the tag.
            exist_ok: leave a tag of that name where it is.
            move: take a tag of that name away from where it is.

        Returns:
            What the tag names.

        Raises:
            ConflictError: the tag is at another revision.
        """
        what, body = f"create the tag {name!r}", {"tag": name} | ({"message": message} if message else {})
        url = self._client.api_url("tag", at.commit)
        try:
            self._client.send("POST", url, what, needs="write", json=body)
        except ConflictError as error:
            there = self.tags().get(name)
            if there == at.commit or (there is not None and exist_ok and not move):
                return Revision(name, there)
            if there is None or not move:
                message = f"{self._client.repo}: the tag {name!r} is at {str(there)[:12]}, not {at.commit[:12]}"
                raise ConflictError(message, hint="choose another tag") from error
            self._delete("tag", name, f"move the tag {name!r}")
            return self.tag(name, at, message)
        return Revision(name, at.commit)

    def url_of(self, revision: Revision) -> str:
        """The page of a revision."""
        if revision.branch.startswith("refs/pr/"):
            return self._client.web_url("discussions", revision.branch.removeprefix("refs/pr/"))
        return self._client.web_url("tree", revision.commit)

    def publish_id_of(self, revision: Revision) -> str | None:
        """The publish id that a commit carries, or None."""
        made = history_of(self._client, revision.commit, until=None, most=1)
        return made[0].publish_id if made else None

    def pull_request_of(self, publish_id: str) -> Revision | None:
        """The open pull request, among the newest, whose last commit carries a publish id that begins so, or None."""
        return open_pull_request_of(self._client, publish_id)

    def check_card(self, text: str) -> Sequence[str]:
        """Ask the Hub whether it would take a README.md; its warnings.

        Raises:
            FormatError: the metadata is invalid, with the Hub's reasons.
        """
        return check_card(self._client, text)

    def advice(
        self, branch: str, files: Mapping[str, tuple[int, bytes]], *, create_pr: bool = False
    ) -> Mapping[str, Advice]:
        """What the Hub says of files (path to size and first 512 bytes) before they are sent to a branch."""
        return self._stager.advice(branch, files, create_pr=create_pr)

    def _delete(self, kind: str, name: str, what: str) -> None:
        try:
            self._client.send("DELETE", self._client.api_url(kind, name), what, needs="write")
        except NotFoundError as error:  # gone already, by a request whose answer was lost, too
            if not is_revision_missing(error):
                raise

    def _new_branch(self, branch: str) -> Revision:
        head = self.head(branch)
        if head is not None:
            raise ConflictError(
                f"{self._client.repo}: the branch {branch!r} exists already, at {head.commit[:12]}",
                hint="look at what is there, then run it again on that head",
            )
        main = self._client.api_url("commits", _MAIN)
        first = None
        for made in self._client.pages(main, "look for the first commit", made_of):
            first = made
        if first is None:
            raise NotFoundError(f"{self._client.repo} has no commits")
        return self.create_branch(branch, Revision(_MAIN, first.commit))

    def _present(self, at: Revision, paths: set[str]) -> Sequence[str]:
        """Those of `paths` that are files of a revision."""
        wanted = sorted(paths)
        found: list[str] = []
        for start in range(0, len(wanted), PATHS_PER_REQUEST):
            found += self._client.ask(
                "POST",
                self._client.api_url("paths-info", at.commit),
                f"look at files at {at.commit[:12]}",
                lambda items: [str(item["path"]) for item in items if item["type"] == "file"],
                data={"paths": wanted[start : start + PATHS_PER_REQUEST], "expand": False},
            )
        return found

    def _info(self, field: str) -> Mapping[str, Any] | None:
        url, params = self._client.api_url(), {"expand": field}
        try:
            return self._client.ask("GET", url, "look at it", lambda answer: {field: answer[field]}, params=params)
        except NotFoundError:
            return None

    def _refs(self, kind: str) -> Mapping[str, str]:
        return self._client.ask(
            "GET",
            self._client.api_url("refs"),
            "list branches and tags",
            lambda answer: {str(ref["name"]): str(ref["targetCommit"]) for ref in answer[kind]},
        )
