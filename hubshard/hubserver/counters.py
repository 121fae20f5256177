"""Exact counts of what came in, went out and was asked, in memory: what tests of transfers stand on."""

from __future__ import annotations

import threading
from collections import defaultdict

__all__ = ["BYTE_KINDS", "Counters"]

BYTE_KINDS = ("lfs_received", "xet_received", "regular_received", "resolve_sent", "xet_sent")
"""Bytes counted per repo: LFS uploads, xorbs, contents inside commits; files served, xorbs served."""


class Counters:
    """Counts per repo (`models/ns/name`) and requests per route kind; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._repos: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._requests: defaultdict[str, int] = defaultdict(int)

    def add(self, repo: str, kind: str, amount: int) -> None:
        """Add to a repo's count.

        Args:
            repo: `models/ns/name`, `datasets/ns/name` or `spaces/ns/name`.
            kind: one of `BYTE_KINDS` (bytes) or `commits`.
            amount: bytes or commits.
        """
        with self._lock:
            self._repos[repo][kind] += amount

    def add_request(self, kind: str) -> None:
        """Count one request of a kind of route (`commit`, `resolve`, `lfs_upload`, …)."""
        with self._lock:
            self._requests[kind] += 1

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._repos.clear()
            self._requests.clear()

    def as_dict(self) -> dict[str, object]:
        """`{"repos": {repo: {kind: n}}, "requests": {kind: n}, "total": {kind: n}}`."""
        with self._lock:
            repos = {
                repo: {**dict.fromkeys((*BYTE_KINDS, "commits"), 0), **counts}
                for repo, counts in sorted(self._repos.items())
            }
            total: dict[str, int] = dict.fromkeys((*BYTE_KINDS, "commits"), 0)
            for counts in repos.values():
                for kind, amount in counts.items():
                    total[kind] = total.get(kind, 0) + amount
            return {"repos": repos, "requests": dict(sorted(self._requests.items())), "total": total}
