"""The sha256 of a file that is still on its way in: xorbs are hashed as they come, not all at the end.

It is a guess, which the file's shard confirms or not: that a file whose first chunk a client has just asked for begins
with the xorb that begins with this chunk, and goes on with the xorbs that are sent after it. Where the guess was wrong,
or not made, because several files of one repo come at once, the file is hashed from disk when its shard comes.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hubshard.errors import IntegrityError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from hashlib import _Hash

    from hubshard.hubserver.xet.shard import ShardTerm
    from hubshard.hubserver.xet.storage import XorbStore

__all__ = ["Ahead"]

_MOST_REPOS = 64


@dataclass(slots=True)
class _Guess:
    """What a file is thought to be made of.

    Attributes:
        chunk: the hash of its first chunk.
        files: how many files were asked for since a shard came; with more than one there is no guess.
        sent: its xorbs, in the order in which their uploads began.
        stored: those of them that have come.
        states: for each that was hashed, the sha256 of all up to its end.
        hashing: held by the thread that adds to `states`.
    """

    chunk: bytes
    files: int
    sent: list[bytes] = field(default_factory=list)
    stored: set[bytes] = field(default_factory=set)
    states: list[_Hash] = field(default_factory=list)
    hashing: threading.Lock = field(default_factory=threading.Lock)


class Ahead:
    """The guesses of a server, one for each repo at most. Safe with several threads.

    Args:
        xorbs: where xorbs are read.
    """

    def __init__(self, xorbs: XorbStore) -> None:
        self._xorbs = xorbs
        self._lock = threading.Lock()
        self._guesses: dict[int, _Guess] = {}

    def file_begins(self, repo_id: int, chunk: bytes) -> None:
        """Take note that a client asks for the first chunk of a file."""
        with self._lock:
            last = self._guesses.pop(repo_id, None)
            files = 0 if last is None else last.files - (last.chunk == chunk)  # a client that was killed asks again
            self._guesses[repo_id] = _Guess(chunk, files + 1)
            for oldest in list(self._guesses)[:-_MOST_REPOS]:
                del self._guesses[oldest]

    def xorb_begins(self, repo_id: int, xorb: bytes) -> None:
        """Take note that the upload of a xorb begins."""
        with self._lock:
            guess = self._guesses.get(repo_id)
            if guess is not None and guess.files == 1 and xorb not in guess.sent:
                guess.sent.append(xorb)

    def xorb_stored(self, repo_id: int, xorb: bytes) -> None:
        """Hash what can be hashed now that a xorb has come, unless another thread is about it."""
        with self._lock:
            guess = self._guesses.get(repo_id)
            if guess is None or xorb not in guess.sent:
                return
            guess.stored.add(xorb)
        if guess.hashing.acquire(blocking=False):
            try:
                while len(guess.states) < len(guess.sent) and guess.sent[len(guess.states)] in guess.stored:
                    self._hash_next(guess)
            except (NotFoundError, IntegrityError):  # whoever checks the file reads it too, and says what is wrong
                self._end(repo_id, guess)
            finally:
                guess.hashing.release()

    def beginning(self, repo_id: int, terms: Sequence[ShardTerm]) -> tuple[_Hash, int]:
        """The sha256 of the longest beginning of a file that was hashed, and how many of its terms that is.

        The repo's guess ends with that.

        Args:
            repo_id: the repo that the file came to.
            terms: what the file is made of.
        """
        with self._lock:
            guess = self._guesses.pop(repo_id, None)
        if guess is None:
            return hashlib.sha256(), 0
        with guess.hashing:
            count = 0
            for term, xorb in zip(terms, guess.sent[: len(guess.states)], strict=False):
                if term.xorb != xorb or (term.start, term.stop) != (0, len(self._xorbs.index(xorb))):
                    break
                count += 1
            return (guess.states[count - 1], count) if count else (hashlib.sha256(), 0)

    def _hash_next(self, guess: _Guess) -> None:
        xorb = guess.sent[len(guess.states)]
        index = self._xorbs.index(xorb)
        if not guess.states and index.hash_of(0) != guess.chunk:
            with self._lock:
                guess.sent.remove(xorb)  # of another file
            return
        digest = guess.states[-1].copy() if guess.states else hashlib.sha256()
        for piece in self._xorbs.read(xorb, 0, index.unpacked_offset(len(index))):
            digest.update(piece)
        guess.states.append(digest)

    def _end(self, repo_id: int, guess: _Guess) -> None:
        with self._lock:
            if self._guesses.get(repo_id) is guess:
                del self._guesses[repo_id]
