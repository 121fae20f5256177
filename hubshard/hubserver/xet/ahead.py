"""The sha256 of a file that is still on its way in: xorbs are hashed as they come, not all at the end.

It is a guess, which the file's shard confirms or not: that a file whose first chunk a client has just asked for begins
with the xorb that begins with this chunk, and goes on with the xorbs that are sent after it, up to the one that begins
the next file. Where the guess was wrong, or not made, because more than two files of one repo come at once, the file is
hashed from disk when its shard comes.
"""

from __future__ import annotations

import contextlib
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
_MOST_FILES = 2  # one, and the next, which may begin before the shard of the first has come


@dataclass(slots=True, eq=False)
class _Guess:
    """What a file is thought to be made of.

    Attributes:
        chunk: the hash of its first chunk.
        next_chunk: of the file that was asked for after it.
        sent: its xorbs, in the order in which their uploads began.
        stored: those of them that have come.
        states: for each that was hashed, the sha256 of all up to its end.
        hashing: held by the thread that adds to `states`.
    """

    chunk: bytes
    next_chunk: bytes | None = None
    sent: list[bytes] = field(default_factory=list)
    stored: set[bytes] = field(default_factory=set)
    states: list[_Hash] = field(default_factory=list)
    hashing: threading.Lock = field(default_factory=threading.Lock)


class Ahead:
    """The guesses of a server, of a few files of each repo. Safe with several threads.

    Args:
        xorbs: where xorbs are read.
    """

    def __init__(self, xorbs: XorbStore) -> None:
        self._xorbs = xorbs
        self._lock = threading.Lock()
        self._guesses: dict[int, list[_Guess]] = {}  # of files whose shards have not come, oldest first

    def file_begins(self, repo_id: int, chunk: bytes) -> None:
        """Take note that a client asks for the first chunk of a file."""
        with self._lock:
            guesses = self._guesses.pop(repo_id, [])
            guesses = [guess for guess in guesses if guess.chunk != chunk]  # a client that was killed asks again
            for guess in guesses[-1:]:
                guess.next_chunk = chunk
            self._guesses[repo_id] = [*guesses[-_MOST_FILES:], _Guess(chunk)]
            for oldest in list(self._guesses)[:-_MOST_REPOS]:
                del self._guesses[oldest]

    def xorb_begins(self, repo_id: int, xorb: bytes) -> None:
        """Take note that the upload of a xorb begins."""
        with self._lock:
            guesses = self._guesses.get(repo_id, [])
            for guess in guesses if len(guesses) <= _MOST_FILES else ():
                if xorb not in guess.sent:
                    guess.sent.append(xorb)

    def xorb_stored(self, repo_id: int, xorb: bytes) -> None:
        """Hash what can be hashed now that a xorb has come, unless another thread is about it."""
        with self._lock:
            guesses = [guess for guess in self._guesses.get(repo_id, []) if xorb in guess.sent]
            for guess in guesses:
                guess.stored.add(xorb)
        for guess in guesses:
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

        The guess ends with that, and those of files that were asked for before it.

        Args:
            repo_id: the repo that the file came to.
            terms: what the file is made of.
        """
        guess = self._take(repo_id, terms[0]) if terms else None
        if guess is None:
            return hashlib.sha256(), 0
        with guess.hashing:
            count = 0
            for term, xorb in zip(terms, guess.sent[: len(guess.states)], strict=False):
                if term.xorb != xorb or (term.start, term.stop) != (0, len(self._xorbs.index(xorb))):
                    break
                count += 1
            return (guess.states[count - 1], count) if count else (hashlib.sha256(), 0)

    def _take(self, repo_id: int, first: ShardTerm) -> _Guess | None:
        chunk = None
        with contextlib.suppress(NotFoundError, IntegrityError):
            chunk = self._xorbs.index(first.xorb).hash_of(first.start)
        with self._lock:
            guesses = self._guesses.pop(repo_id, [])
            number = next((number for number, guess in enumerate(guesses) if guess.chunk == chunk), None)
            if rest := guesses[1 if number is None else number + 1 :]:
                self._guesses[repo_id] = rest
        return None if number is None else guesses[number]

    def _hash_next(self, guess: _Guess) -> None:
        xorb = guess.sent[len(guess.states)]
        index = self._xorbs.index(xorb)
        begins = index.hash_of(0)
        if begins == guess.next_chunk or (not guess.states and begins != guess.chunk):
            with self._lock:
                guess.sent.remove(xorb)  # of another file
            return
        digest = guess.states[-1].copy() if guess.states else hashlib.sha256()
        for piece in self._xorbs.read(xorb, 0, index.unpacked_offset(len(index))):
            digest.update(piece)
        guess.states.append(digest)

    def _end(self, repo_id: int, guess: _Guess) -> None:
        with self._lock:
            guesses = self._guesses.get(repo_id, [])
            if guess in guesses:
                guesses.remove(guess)
